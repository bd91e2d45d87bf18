"""Tensor parallelism (`tp`): single matrices are cut over ranks that all see the same data.

The modules stay what they are: a cut `Linear` holds its part of the weight as an ordinary parameter, and hooks around its `forward`
communicate (`collectives`). So adapters, DDP, FSDP and pipeline stages meet nothing unusual. How a module is cut says the model's
own plan (`base_model_tp_plan`), else its family's. Between blocks activations are whole and equal on all tp ranks.

Parameters that are whole but see only this rank's heads (q_norm, k_norm) get parts of a sum as gradients. transformers' own style
`replicated_with_grad_allreduce` adds them in every backward pass, which under accumulation adds again what was added; here they are
named in `TensorCut.partial` and added once, at the step.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from twinkle_core.errors import MeshError, ModelError
from twinkle_core.parallel import collectives

COLUMN, ROW, GATHERED, PARTIAL = "colwise", "rowwise", "colwise_gather_output", "replicated_with_grad_allreduce"
_WHOLE = ("packed_colwise", "moe_tp_experts", "moe_experts_allreduce", "ep_router")  # experts stay whole on every tp rank


@dataclass
class TensorCut:
    """What tensor parallelism did to a module.

    Attributes:
        dims: parameter name -> the dim that is cut over tp.
        partial: names of whole parameters whose gradients are to be added over tp.
    """

    dims: dict[str, int] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)


def plan_of(module: nn.Module, own_plan: Mapping[str, str]) -> dict[str, str]:
    """Return module name -> style for every module of `module` that the plan cuts; embedding and head by vocabulary.

    `own_plan`: of the family, where transformers has none. Raises: `ModelError` for a model without a plan or with a style that is
    not known.
    """
    config: Any = module.config
    plan = getattr(config.get_text_config(), "base_model_tp_plan", None) or own_plan
    if not plan:
        raise ModelError(f"`{type(module).__name__}` has no tensor-parallel plan, neither in transformers nor in an installed model "
                         "family. Use a mesh without `tp`.")
    prefix = re.escape(str(module.base_model_prefix)) + r"\."
    patterns = [(re.compile(prefix + re.escape(name).replace(r"\*", r"\d+")), style) for name, style in plan.items()]
    found: dict[str, str] = {}
    for name, child in module.named_modules():
        for pattern, style in patterns:
            if not pattern.fullmatch(name) or style in _WHOLE or ".experts" in name:
                continue
            if style not in (COLUMN, ROW, GATHERED, PARTIAL):
                raise ModelError(f"The tensor-parallel plan of `{type(module).__name__}` cuts `{name}` by the style `{style}`, which "
                                 "is not built. Use a mesh without `tp`.")
            if style == PARTIAL or isinstance(child, nn.Linear):
                found[name] = style
    return found


def check_sizes(config: Any, tp: int) -> None:
    """Raise `MeshError` unless `tp` divides the heads, the key/value heads and the vocabulary of a model."""
    text = config.get_text_config()
    fits = [size for size in range(1, int(text.num_attention_heads) + 1) if all(int(getattr(text, name)) % size == 0 for name in _DIVIDED)]
    for name in _DIVIDED:
        if int(getattr(text, name)) % tp:
            raise MeshError(f"`tp={tp}` does not divide `{name}={getattr(text, name)}` of model type `{text.model_type}`. Use tp in "
                            f"{{{', '.join(map(str, fits))}}}.")


_DIVIDED = ("num_attention_heads", "num_key_value_heads", "vocab_size")


def cut_linear(name: str, linear: nn.Linear, style: str, group: Any, cut: TensorCut) -> None:
    """Cut a linear layer in place and put the communication around it; `name` is its name, for `cut`."""
    dim = 1 if style == ROW else 0
    linear.weight = _part(linear.weight, dim, group, f"{name}.weight")
    cut.dims[f"{name}.weight"] = dim
    if style == ROW:
        linear.in_features = linear.weight.shape[1]

        def forward(x: torch.Tensor) -> torch.Tensor:
            out = collectives.reduce(nn.functional.linear(x, linear.weight), group)
            return out if linear.bias is None else out + linear.bias

        linear.forward = forward  # type: ignore[method-assign]
        return
    linear.out_features = linear.weight.shape[0]
    if linear.bias is not None:
        linear.bias = _part(linear.bias, 0, group, f"{name}.bias")
        cut.dims[f"{name}.bias"] = 0
    linear.register_forward_pre_hook(lambda _m, args: (collectives.copy(args[0], group), *args[1:]))
    if style == GATHERED:
        linear.register_forward_hook(lambda _m, _i, out: collectives.gather(out, group))


def cut_embedding(name: str, embedding: nn.Embedding, group: Any, cut: TensorCut) -> None:
    """Cut an embedding by vocabulary: a rank looks up the tokens it has, the rest is added."""
    embedding.weight = _part(embedding.weight, 0, group, f"{name}.weight")
    embedding.padding_idx = None
    cut.dims[f"{name}.weight"] = 0
    rows = embedding.num_embeddings = embedding.weight.shape[0]
    first = rows * dist.get_rank(group)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        own = (ids >= first) & (ids < first + rows)
        local = nn.functional.embedding((ids - first).clamp(0, rows - 1), embedding.weight)
        return collectives.reduce(local * own[..., None], group)

    embedding.forward = forward  # type: ignore[method-assign]


def _part(parameter: nn.Parameter, dim: int, group: Any, name: str) -> nn.Parameter:
    size = dist.get_world_size(group)
    if parameter.shape[dim] % size:
        raise MeshError(f"`tp={size}` does not divide dim {dim} of `{name}`, which has shape {tuple(parameter.shape)}. Use a tp that does.")
    part = parameter.detach().chunk(size, dim)[dist.get_rank(group)].clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)
