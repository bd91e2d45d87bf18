"""A module on the ranks of a mesh: what was done to it, so that gradients, norms and checkpoints know."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from twinkle_core.parallel.ranks import Ranks


@dataclass
class TensorCut:
    """What tensor parallelism did.

    Attributes:
        dims: parameter name -> the dim that is cut over tp.
        partial: names of whole parameters whose gradients are to be added over tp.
        head_is_cut: whether the output layer holds a part of the vocabulary.
    """

    dims: dict[str, int] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    head_is_cut: bool = False


@dataclass(kw_only=True)
class Placed:
    """A module and the ranks that it lives on.

    Attributes:
        module: the Hugging Face module.
        root: calls the module and computes the loss in its `forward`, so that what wraps it sees every use of a parameter.
        ranks: the ranks.
        blocks: class names of the layers, each of which is gathered by itself.
        own_plan: tensor-parallel plan of the family, where transformers has none.
        is_lora: whether the module's own weights are frozen.
        hidden_dtype: of what goes from layer to layer.
        cut: what tensor parallelism did.
        is_sharded: whether `fsdp` holds the parameters, as DTensors.
        stages: (stage number, chunk of layers) of this rank under `pp`.
        tied: the group of the first and last stage, which both hold the tied embedding; None elsewhere.
        replica: the `DistributedDataParallel` around `root`, or None.
    """

    module: Any
    root: torch.nn.Module
    ranks: Ranks
    blocks: Sequence[str] = ()
    own_plan: Mapping[str, str] = field(default_factory=dict)
    is_lora: bool = False
    hidden_dtype: torch.dtype = torch.float32
    cut: TensorCut = field(default_factory=TensorCut)
    is_sharded: bool = False
    stages: list[tuple[int, Any]] = field(default_factory=list)
    tied: Any = None
    replica: Any = None

    def sharded_groups(self) -> list[Any]:
        """Return FSDP's groups of parameters, each of which is gathered and reduced at once."""
        if not self.is_sharded:
            return []
        states = fully_shard.state(self.root)._state_ctx.all_states  # type: ignore[attr-defined]
        return [group for state in states for group in state._fsdp_param_groups]

    def discard_held(self) -> None:
        """Forget gradients that FSDP holds back until the last backward pass before the step; they are in no parameter's `grad`."""
        for group in self.sharded_groups():
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter.unsharded_param.grad = None

    @property
    def data_world_size(self) -> int:
        """The number of ranks that see different data, over which gradients are averaged."""
        return self.ranks.mesh.data_world_size


def part_of(name: str, tensor: torch.Tensor, placed: Placed | None) -> tuple[list[int], list[int], list[int]]:
    """Return (where this rank's part begins in the whole parameter, the part's shape, the whole shape), one number a dim."""
    shape, start, whole = list(tensor.shape), [0] * tensor.ndim, list(tensor.shape)
    if isinstance(tensor, DTensor):
        local_shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        shape, start = list(local_shape), list(offset)
    dim = None if placed is None else placed.cut.dims.get(name)
    if placed is not None and dim is not None:  # tp has cut before fsdp
        start[dim] += placed.ranks.coordinates["tp"] * whole[dim]
        whole[dim] *= placed.ranks.size("tp")
    return start, shape, whole
