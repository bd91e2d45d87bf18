"""Tensor parallelism (`tp`): single matrices are cut over ranks that all see the same data.

The modules stay what they are: a cut `Linear` holds its part of the weight as an ordinary parameter, and communication stands
around its product (`collectives`). So adapters, FSDP and pipeline stages meet nothing unusual. How a module is cut says the
model's own plan (`base_model_tp_plan`), else its family's; embedding and output layer are cut by vocabulary, tied if they were.
Between blocks activations are whole and equal on all tp ranks.

Parameters that are whole but see only this rank's heads (q_norm, k_norm) get parts of a sum as gradients. transformers' own style
`replicated_with_grad_allreduce` adds them in every backward pass, which under accumulation adds again what was added; here they are
named in `TensorCut.partial` and added once, at the step.
"""

import re
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from twinkle_core.errors import MeshError, ModelError
from twinkle_core.mesh import DeviceMesh
from twinkle_core.parallel import collectives
from twinkle_core.parallel.interface import ParallelStrategy
from twinkle_core.parallel.placed import Placed

COLUMN, ROW, GATHERED, PARTIAL = "colwise", "rowwise", "colwise_gather_output", "replicated_with_grad_allreduce"
_WHOLE = ("packed_colwise", "moe_tp_experts")  # of experts, which stay whole on every tp rank
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "vocab_size")


class TensorStrategy(ParallelStrategy):
    """`tp`."""

    def check(self, config: Any, mesh: DeviceMesh) -> None:
        """Raise `MeshError` unless tp divides the heads, the key/value heads and the vocabulary."""
        text = config.get_text_config()
        sizes = {name: int(getattr(text, name)) for name in _DIVIDED}
        fits = [tp for tp in range(1, sizes["num_attention_heads"] + 1) if not any(size % tp for size in sizes.values())]
        for name, size in sizes.items():
            if size % mesh.tp:
                raise MeshError(f"`tp={mesh.tp}` does not divide `{name}={size}` of model type `{text.model_type}`. Use tp in "
                                f"{{{', '.join(map(str, fits))}}}.")

    def apply(self, placed: Placed) -> None:
        """Cut the modules that the plan names, then embedding and output layer."""
        group = placed.ranks.group("tp")
        plan = plan_of(placed)
        inputs = {parent: _SharedInput(group, count) for parent, count in Counter(
            name.rpartition(".")[0] for name, style in plan.items() if style in (COLUMN, GATHERED)).items()}
        for name, style in plan.items():
            module = placed.module.get_submodule(name)
            if style == PARTIAL:
                placed.cut.partial.update(f"{name}.{own}" for own, _ in module.named_parameters())
                continue
            base = f"{name}.base_layer" if hasattr(module, "base_layer") else name
            _cut_linear(base, placed.module.get_submodule(base), style, group, placed, inputs.get(name.rpartition(".")[0]))
        _cut_vocabulary(placed, group)
        cut_adapters(placed)


def plan_of(placed: Placed) -> dict[str, str]:
    """Return module name -> style. Raises: `ModelError` for a model without a plan, or with a style that is not built."""
    module = placed.module
    plan = getattr(module.config.get_text_config(), "base_model_tp_plan", None) or placed.own_plan
    if not plan:
        raise ModelError(f"`{type(module).__name__}` has no tensor-parallel plan, neither in transformers nor in an installed "
                         "model family. Use a mesh without `tp`.")
    prefix = re.escape(f"{module.base_model_prefix}.")
    patterns = [(re.compile(prefix + re.escape(name).replace(r"\*", r"\d+")), style) for name, style in plan.items()]
    ends = (module.get_input_embeddings(), module.get_output_embeddings())
    vocabulary = {name for name, child in module.named_modules() if child in ends}  # cut by `_cut_vocabulary`
    found: dict[str, str] = {}
    for name, _ in module.named_modules():
        style = next((style for pattern, style in patterns if pattern.fullmatch(name)), None)
        if style is None or style in _WHOLE or ".experts" in name or name in vocabulary:
            continue
        if style not in (COLUMN, ROW, GATHERED, PARTIAL):
            raise ModelError(f"The tensor-parallel plan of `{type(module).__name__}` cuts `{name}` by the style `{style}`, which "
                             "is not built. Use a mesh without `tp`.")
        found[name] = style
    return found


def cut_adapters(placed: Placed) -> None:
    """Cut the LoRA layers of adapters that are not cut yet, as their base layers are.

    Beside a matrix cut by columns, lora_B is cut by columns; beside one cut by rows, lora_A by rows. Where the output is gathered
    an adapter stays whole.
    """
    group = placed.ranks.group("tp")
    for name, style in plan_of(placed).items():
        part = {COLUMN: "lora_B", ROW: "lora_A"}.get(style)
        for adapter, linear in getattr(placed.module.get_submodule(name), part or "", {}).items():
            full_name = f"{name}.{part}.{adapter}"
            if f"{full_name}.weight" not in placed.cut.dims:
                _cut_linear(full_name, linear, style, group, placed)


class _SharedInput:
    """The input of matrices beside each other (q, k, v; gate, up), which all read the same: its gradient is added over tp once."""

    def __init__(self, group: Any, readers: int = 1) -> None:
        self._group, self._readers, self._left = group, readers, 0
        self._kept: tuple[torch.Tensor, bool, torch.Tensor] | None = None

    def copy(self, input: torch.Tensor) -> torch.Tensor:
        """Return `collectives.copy` of `input`, the same one for every reader of it."""
        has_gradient = torch.is_grad_enabled()
        if self._kept is None or self._kept[0] is not input or self._kept[1] is not has_gradient:
            self._kept, self._left = (input, has_gradient, collectives.copy(input, self._group)), self._readers
        copied = self._kept[2]
        self._left -= 1
        if not self._left:
            self._kept = None
        return copied


def _cut_linear(
    name: str, linear: nn.Linear, style: str, group: Any, placed: Placed, shared: _SharedInput | None = None,
) -> None:
    shared = shared or _SharedInput(group)
    dim = 1 if style == ROW else 0
    _cut_parameter(linear, "weight", dim, group, f"{name}.weight", placed)
    if style == ROW:
        linear.in_features = linear.weight.shape[1]
    else:
        linear.out_features = linear.weight.shape[0]
        if linear.bias is not None:
            _cut_parameter(linear, "bias", 0, group, f"{name}.bias", placed)

    def forward(input: torch.Tensor) -> torch.Tensor:
        if style == ROW:
            out = collectives.reduce(nn.functional.linear(input, linear.weight), group)
            return out if linear.bias is None else out + linear.bias
        out = nn.functional.linear(shared.copy(input), linear.weight, linear.bias)
        return collectives.gather(out, group) if style == GATHERED else out

    linear.forward = forward  # type: ignore[method-assign]


def _cut_vocabulary(placed: Placed, group: Any) -> None:
    """Cut embedding and output layer, as far as this pipeline stage has them: each rank has a range of tokens."""
    module = placed.module
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    names = {id(child): name for name, child in module.named_modules()}
    is_tied = isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear) and head.weight is embedding.weight
    if isinstance(embedding, nn.Embedding):
        _cut_embedding(names[id(embedding)], embedding, group, placed)
    if is_tied:
        head.weight, head.out_features = embedding.weight, embedding.num_embeddings
        placed.cut.dims[f"{names[id(head)]}.weight"] = 0

        def all_logits(input: torch.Tensor) -> torch.Tensor:
            return collectives.gather(nn.functional.linear(collectives.copy(input, group), head.weight), group)

        head.forward = all_logits  # type: ignore[method-assign]
    elif isinstance(head, nn.Linear):
        _cut_linear(names[id(head)], head, GATHERED, group, placed)
    placed.cut.head_is_cut = isinstance(head, nn.Linear)


def _cut_embedding(name: str, embedding: nn.Embedding, group: Any, placed: Placed) -> None:
    _cut_parameter(embedding, "weight", 0, group, f"{name}.weight", placed)
    rows = embedding.num_embeddings = embedding.weight.shape[0]
    first = rows * dist.get_rank(group)

    def look_up(ids: torch.Tensor) -> torch.Tensor:
        is_own = (ids >= first) & (ids < first + rows)
        found = nn.functional.embedding((ids - first).clamp(0, rows - 1), embedding.weight)
        return collectives.reduce(found * is_own[..., None], group)

    embedding.forward = look_up  # type: ignore[method-assign]


def _cut_parameter(module: nn.Module, attribute: str, dim: int, group: Any, name: str, placed: Placed) -> None:
    whole: nn.Parameter = getattr(module, attribute)
    size = dist.get_world_size(group)
    if whole.shape[dim] % size:
        raise MeshError(f"`tp={size}` does not divide dim {dim} of `{name}`, whose shape is {tuple(whole.shape)}. Use a tp that "
                        "does.")
    part = whole.detach().chunk(size, dim)[dist.get_rank(group)].clone(memory_format=torch.contiguous_format)
    setattr(module, attribute, nn.Parameter(part, requires_grad=whole.requires_grad))
    placed.cut.dims[name] = dim

