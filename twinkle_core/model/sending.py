"""The weights of a model as a sampler wants them: whole tensors under plain names, a bucket at a time.

On several ranks a tensor is made whole when its bucket is read, on the first rank, which gives it away; an adapter is merged layer
by layer. So nobody holds more than its own part and a bucket.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from twinkle_core.errors import ModelError
from twinkle_core.model.adapter import AdapterState
from twinkle_core.model.layout import adapter_file_name
from twinkle_core.model.merging import merged_layer, plain_name
from twinkle_core.model.placing import part_of
from twinkle_core.parallel.gathering import whole_tensor
from twinkle_core.parallel.placed import Placed
from twinkle_core.weight_sync.interface import WeightBucket, WeightPlan, buckets_of

if TYPE_CHECKING:
    from twinkle_core.model.transformers_model import TransformersModel


class Sending:
    """One plan, and the tensors that it names.

    Args:
        model: whose weights.
        state: of the adapter, or of the whole model.
        merge: send the model's weights with the adapter merged into them, instead of the adapter alone.
        bucket_bytes: of a bucket.

    Attributes:
        plan: what will be sent.
    """

    def __init__(self, model: "TransformersModel", state: AdapterState, *, merge: bool, bucket_bytes: int) -> None:
        if state.placed is None:
            raise ModelError("This model is on no ranks yet.")
        self._placed: Placed = state.placed
        self._module, self._adapter = model.module, state.name
        self._merges = merge and state.is_lora
        is_alone = state.is_lora and not merge
        self._own = dict(
            _adapter_tensors(state) if is_alone else _model_tensors(model.module, state.name if self._merges else None))
        described = {name: (part_of(full_name, tensor, self._placed)[2], tensor.element_size())
                     for name, (full_name, tensor) in self._own.items()}
        described = self._placed.ranks.union_of_stages(described, keep=True)
        sizes = {name: element_bytes * torch.Size(shape).numel() for name, (shape, element_bytes) in described.items()}
        self.plan = WeightPlan(
            buckets=buckets_of(sizes, bucket_bytes=bucket_bytes),
            shapes={name: tuple(shape) for name, (shape, _) in described.items()},
            adapter=model.lora.configs[state.name].to_dict() if is_alone else None)

    @torch.no_grad()
    def read(self, index: int) -> WeightBucket:
        """Return a bucket on the first rank, and an empty one on the others. Every rank must call it."""
        ranks = self._placed.ranks
        is_first = ranks.rank == 0
        own: dict[str, torch.Tensor] = {}
        for name in self.plan.buckets[index]:
            if name in self._own:
                whole = self._whole(*self._own[name])
                if is_first or ranks.size("pp") > 1:
                    own[name] = whole
        tensors = ranks.union_of_stages(own, keep=is_first) if ranks.size("pp") > 1 else own
        return WeightBucket(tensors)

    def _whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        path, _, leaf = name.rpartition(".")
        layer = self._module.get_submodule(path.removesuffix(".base_layer")) if self._merges else None
        if not isinstance(layer, BaseTunerLayer) or not _has(layer, self._adapter):
            return whole_tensor(self._placed, name, tensor.detach())
        if self._placed.ranks.mesh.world_size == 1:
            return merged_layer(layer, self._adapter).get(leaf, tensor.detach())
        base = whole_tensor(self._placed, name, tensor.detach())
        if leaf != "weight":
            return base
        delta = _delta(layer, self._adapter, name)
        if delta.shape != base.shape:  # cut over tp as its base is
            delta = whole_tensor(self._placed, name, delta)
        wide = torch.promote_types(base.dtype, delta.dtype)
        return (base.to(wide) + delta.to(wide)).to(base.dtype)


def _has(layer: BaseTunerLayer, adapter: str) -> bool:
    return any(adapter in getattr(layer, kind) for kind in layer.adapter_layer_names)


def _delta(layer: Any, adapter: str, name: str) -> torch.Tensor:
    """Return what a LoRA adds to its layer's weight. Raises: `ModelError` for one that does more than add."""
    if getattr(layer, "use_dora", {}).get(adapter) or getattr(layer, "lora_bias", {}).get(adapter):
        raise ModelError(f"The adapter `{adapter}` does more to `{name}` than adding to its weight (`use_dora` or `lora_bias`), "
                         "which cannot be merged on several ranks. Leave `merge_and_sync` out, or use a group of one rank.")
    return layer.get_delta_weight(adapter)


def _adapter_tensors(state: AdapterState) -> Iterator[tuple[str, tuple[str, torch.Tensor]]]:
    """Yield name in peft's files -> (name in the module, tensor)."""
    for name, parameter in state.parameters.items():
        yield adapter_file_name(name, state.name), (name, parameter)


def _model_tensors(module: torch.nn.Module, merge: str | None) -> Iterator[tuple[str, tuple[str, torch.Tensor]]]:
    """Yield plain name -> (name in the module, tensor), of tied ones the first."""
    seen: set[tuple[int, bool]] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        plain = plain_name(name, merge, module)
        if plain is None or tensor is None:
            continue
        layer = module.get_submodule(name.rpartition(".")[0].removesuffix(".base_layer"))
        is_merged = merge is not None and isinstance(layer, BaseTunerLayer) and _has(layer, merge)
        if (id(tensor), is_merged) not in seen:  # merging into one of two tied weights unties them
            seen.add((id(tensor), is_merged))
            yield plain, (name, tensor)
