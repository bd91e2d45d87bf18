"""From this rank's part of a tensor to the whole of it."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

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
