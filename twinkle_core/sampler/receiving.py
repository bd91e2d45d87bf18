"""Weights that arrive at a sampler in buckets.

Whole weights are copied into the sampler's model; an adapter is merged into a copy, as one from a checkpoint is. Names and shapes
are held against the model before anything changes.
"""

from collections.abc import Mapping
from typing import Any

import torch

from twinkle_core.errors import CheckpointError, SamplerError, listing
from twinkle_core.sampler.adapters import AdapterModels, merge_adapter
from twinkle_core.weight_sync.interface import WeightBucket, WeightPlan, missing_names


class Receiver:
    """What has arrived so far of one plan."""

    def __init__(self, plan: WeightPlan, adapters: AdapterModels) -> None:
        self._plan, self._adapters = plan, adapters
        self._targets = {} if plan.adapter is not None else _targets(adapters.base, plan.shapes)
        self._arrived: dict[str, torch.Tensor | None] = {}

    @torch.no_grad()
    def write(self, bucket: WeightBucket) -> None:
        """Take one bucket."""
        for name, tensor in bucket.tensors.items():
            if self._plan.adapter is not None:
                self._arrived[name] = tensor.to(next(self._adapters.base.parameters()).device, copy=True)
                continue
            self._targets[name].copy_(tensor)
            self._arrived[name] = None

    def end(self) -> None:
        """Let the sampler use what has arrived. Raises: `SamplerError` if something is missing."""
        missing = missing_names(self._plan, list(self._arrived))
        if missing:
            raise SamplerError(f"{len(missing)} of {len(self._plan.shapes)} weights have not arrived: {listing(missing[:3])}. Call "
                               "`sync_weights()` again.")
        if self._plan.adapter is None:
            self._adapters.clear()  # copies of the old weights
        else:
            weights: dict[str, Any] = dict(self._arrived)
            try:
                self._adapters.synchronised = merge_adapter(
                    self._adapters.base, self._plan.adapter, weights, where="the adapter that was sent",
                    what="The adapter that was sent does not fit this sampler's model")
            except CheckpointError as error:
                raise SamplerError(f"{error} Build the sampler with the `model_id` of the model.") from error


def _targets(base: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Return name -> tensor to copy into. Raises: `SamplerError` unless names and shapes are the model's."""
    own = base.state_dict(keep_vars=True)
    written = {id(own[name]) for name in shapes if name in own}
    unknown = [name for name in shapes if name not in own]
    lacking = [name for name, tensor in own.items() if id(tensor) not in written]
    if unknown or lacking:
        raise SamplerError(f"The weights that the model sends are not those of this sampler's `{type(base).__name__}`: it has no "
                           f"{listing(unknown[:3]) or 'others'}, and gets no {listing(lacking[:3]) or 'fewer'}. Build the sampler "
                           "with the `model_id` of the model.")
    if len(written) < len(shapes):
        raise SamplerError("The model sends weights apart that are one in this sampler's model (tied embeddings, say, of which the "
                           "adapter changes one). Leave `merge_and_sync` out.")
    for name, shape in shapes.items():
        if tuple(own[name].shape) != tuple(shape):
            raise SamplerError(f"`{name}` is sent with the shape {tuple(shape)}, and has {tuple(own[name].shape)} in this sampler. "
                               "Build the sampler with the `model_id` of the model.")
    return {name: own[name].detach() for name in shapes}
