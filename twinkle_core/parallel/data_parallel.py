"""Data parallelism: `dp` replicates the model, `fsdp` shards its parameters, gradients and optimizer state as well.

Both average gradients over the data ranks. An adapter's parameters are small and stay whole on every rank; `gradients` reduces
them once, at the step.
"""

import inspect
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from twinkle_core.mesh import DeviceMesh
from twinkle_core.parallel.interface import ParallelStrategy
from twinkle_core.parallel.placed import Placed

_STILL_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in inspect.signature(
    DistributedDataParallel).parameters else "broadcast_buffers": False}
"""Keeps buffers where they are in forward passes; torch 2.13 gave the option another name."""


class ReplicateStrategy(ParallelStrategy):
    """`dp`: `DistributedDataParallel` where nothing else cuts the parameters; else one reduction at the step."""

    def check(self, config: Any, mesh: DeviceMesh) -> None:
        """Any size fits any model."""

    def apply(self, placed: Placed) -> None:
        """Wrap the root, unless gradients are reduced elsewhere: by `fsdp`, or at the step."""
        mesh = placed.ranks.mesh
        if placed.is_lora or mesh.fsdp > 1 or mesh.tp > 1 or mesh.pp > 1:
            return
        placed.replica = DistributedDataParallel(
            placed.root, process_group=placed.ranks.group("dp"), gradient_as_bucket_view=True, **_STILL_BUFFERS)


class ShardStrategy(ParallelStrategy):
    """`fsdp`: every layer is gathered when it is used; with `dp` > 1, groups of `fsdp` ranks are replicated (HSDP).

    Source: Zhao et al. 2023 (PyTorch FSDP); `fully_shard` is its second design.
    """

    def check(self, config: Any, mesh: DeviceMesh) -> None:
        """Any size fits any model: what does not divide is padded."""

    def apply(self, placed: Placed) -> None:
        """Shard the layers one by one, then the rest (embedding, norm, head), which stays gathered until the backward pass."""
        axes = ("dp", "fsdp") if placed.ranks.mesh.dp > 1 else ("fsdp",)
        mesh = placed.ranks.torch_mesh[axes]
        whole = {parameter for parameter in placed.root.parameters() if placed.is_lora and parameter.requires_grad}
        layers = [module for module in placed.module.modules() if type(module).__name__ in placed.blocks]
        for layer in layers:
            fully_shard(layer, mesh=mesh, ignored_params=_within(layer, whole))
        fully_shard(placed.root, mesh=mesh, reshard_after_forward=False, ignored_params=whole or None)
        placed.is_sharded = True


def _within(module: torch.nn.Module, parameters: set[torch.nn.Parameter]) -> set[torch.nn.Parameter] | None:
    return {parameter for parameter in module.parameters() if parameter in parameters} or None
