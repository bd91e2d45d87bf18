"""Gradients over the ranks: when they are reduced, and their global norm.

Between two steps a gradient is the average over the data ranks of sums over tokens, or on its way there:

* under `fsdp` and DDP each backward pass reduces, but for those that `reducing(False)` holds back;
* in a pipeline the backward passes of a call hold them back, and `reducing_once` reduces them after the last;
* what is left (adapters; anything under `dp` with `tp` or `pp`) is reduced once, by `finish`, with one collective;
* parts over tp (`TensorCut.partial`) are added there too.

Averages may be reduced again without harm, so a backward pass after a clip is right. Sums over tp are not: `reopen` undoes them.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from twinkle_core.parallel.placed import Placed
from twinkle_core.parallel.ranks import DATA_AXES


@contextlib.contextmanager
def reducing(placed: Placed | None, is_last: bool) -> Iterator[None]:
    """Reduce the gradients of the backward pass inside the block only if it `is_last` before the step."""
    if placed is None:
        yield
        return
    if placed.is_sharded:
        placed.root.set_requires_gradient_sync(is_last)  # type: ignore[operator]
    with contextlib.nullcontext() if placed.replica is None or is_last else placed.replica.no_sync():
        yield


@contextlib.contextmanager
def reducing_once(placed: Placed, is_last: bool) -> Iterator[None]:
    """Hold back the gradients of all backward passes inside the block; reduce them after it if it `is_last` before the step.

    In a pipeline forward and backward passes of several micro-batches alternate, so none of them is known to be the last.
    """
    if not placed.is_sharded:
        yield
        return
    placed.root.set_requires_gradient_sync(False)  # type: ignore[operator]
    yield
    if not is_last:
        return
    placed.root.set_requires_gradient_sync(True)  # type: ignore[operator]
    state = fully_shard.state(placed.root)  # type: ignore[attr-defined]
    for group in placed.sharded_groups():
        group.post_backward()  # as `torch.distributed.pipelining` does for stages that are FSDP modules (2.13); nothing public does
    state._root_post_backward_final_callback()


def finish(placed: Placed, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Reduce what no backward pass has reduced. Every rank must call it with the same parameters."""
    held = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    group = placed.ranks.group(*DATA_AXES)
    if group is not None and placed.replica is None:
        own = [_grad(parameter) for parameter in held.values() if not isinstance(parameter, DTensor)]
        _all_reduce(own, group, scale=1.0 / placed.data_world_size)
    if placed.tied is not None:
        _all_reduce([local(_grad(held[name])) for name in held if _is_embedding(placed, held[name])], placed.tied, scale=1.0)
    group = placed.ranks.group("tp")
    if group is not None:
        _all_reduce([local(_grad(held[name])) for name in held if name in placed.cut.partial], group, scale=1.0)


def reopen(placed: Placed, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Make sums over tp parts again, so that another backward pass may add to them."""
    for name, parameter in parameters.items():
        if parameter.grad is None:
            continue
        if name in placed.cut.partial:
            parameter.grad.div_(placed.ranks.size("tp"))
        if placed.tied is not None and _is_embedding(placed, parameter):
            parameter.grad.div_(2)


def global_norm(placed: Placed, parameters: Mapping[str, torch.nn.Parameter]) -> float:
    """Return the L2 norm of all gradients, the same on every rank; what several ranks hold alike counts once.

    Source: Pascanu et al. 2013, sec. 3.2.
    """
    squares: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for name, parameter in parameters.items():
        is_second_copy = placed.tied is not None and placed.ranks.coordinates["pp"] > 0 and _is_embedding(placed, parameter)
        if parameter.grad is None or is_second_copy:
            continue
        axes = ("fsdp",) if isinstance(parameter.grad, DTensor) else ()
        axes += ("tp",) if name in placed.cut.dims else ()
        squares.setdefault(axes, []).append(local(parameter.grad))
    total = 0.0
    for axes in ((), ("fsdp",), ("tp",), ("fsdp", "tp")):  # the same collectives on every rank
        own = float(torch.nn.utils.get_total_norm(squares[axes])) ** 2 if axes in squares else 0.0
        total += placed.ranks.sum_numbers([own], *axes)[0] if placed.ranks.group(*axes) is not None else own
    return placed.ranks.sum_numbers([total], "pp")[0] ** 0.5


def _is_embedding(placed: Placed, parameter: torch.nn.Parameter) -> bool:
    """Whether it is the weight that the first and the last stage share."""
    embedding = placed.module.get_input_embeddings()
    return embedding is not None and parameter is embedding.weight


def local(tensor: Any) -> torch.Tensor:
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:  # a rank whose rows did not use it takes part with zeros
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _all_reduce(tensors: Iterable[torch.Tensor], group: Any, *, scale: float) -> None:
    """Add tensors over `group` in place, in one collective a dtype, and scale them."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        dist.all_reduce(flat, group=group)
        flat.mul_(scale)
        for tensor, piece in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(piece.view_as(tensor))
