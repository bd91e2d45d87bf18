"""The three differentiable collectives of tensor parallelism, on plain tensors.

    copy     forward identity      backward sum
    reduce   forward sum           backward identity
    gather   forward concatenate   backward slice       of the last dim

Source: Shoeybi et al. 2019 (Megatron-LM), sec. 3, whose f and g are `copy` and `reduce`.
"""

from typing import Any

import torch
import torch.distributed as dist


def copy(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Return `x`; its gradients are added over `group`. Before a matrix that is cut by columns."""
    return _Copy.apply(x, group)  # type: ignore[return-value]


def reduce(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sum of `x` over `group`. After a matrix that is cut by rows."""
    return _Reduce.apply(x, group)  # type: ignore[return-value]


def gather(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Return all ranks' `x` side by side in the last dim. What follows must be the same on every rank."""
    return _Gather.apply(x, group)  # type: ignore[return-value]


def _concatenate(x: torch.Tensor, group: Any) -> torch.Tensor:
    pieces = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, x.contiguous(), group=group)
    return torch.cat(pieces, -1)


def _own_part(x: torch.Tensor, group: Any) -> torch.Tensor:
    return x.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)].contiguous()


def _summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _summed(grads[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _concatenate(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _own_part(grads[0], ctx.group), None
