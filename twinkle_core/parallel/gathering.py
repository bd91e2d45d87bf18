"""From this rank's part of a tensor to the whole of it, and back."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from twinkle_core.parallel.placed import Placed


def whole_tensor(placed: Placed, name: str, part: torch.Tensor) -> torch.Tensor:
    """Return the whole of the parameter `name` (or of a tensor that is cut as it is); every rank must call it."""
    whole = part.full_tensor() if isinstance(part, DTensor) else part
    dim = placed.cut.dims.get(name)
    group = placed.ranks.group("tp")
    if dim is None or group is None:
        return whole
    pieces = [torch.empty_like(whole) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, whole.contiguous(), group=group)
    return torch.cat(pieces, dim)


def own_part(placed: Placed, name: str, whole: torch.Tensor, *, into: Any) -> Any:
    """Copy this rank's part of a whole tensor into `into`, which is cut as the parameter `name` is, and return it."""
    dim = placed.cut.dims.get(name)
    if dim is not None:
        whole = whole.chunk(placed.ranks.size("tp"), dim)[placed.ranks.coordinates["tp"]]
    if isinstance(into, DTensor):
        part = distribute_tensor(whole.to(into.device), into.device_mesh, into.placements, src_data_rank=None)
        into.to_local().copy_(part.to_local())
    else:
        into.copy_(whole)
    return into
