"""One call on a group: from the arguments of a handle's method to its result.

Arguments that are lazy results are not fetched. Where their pieces agree with those that the call is cut into, each rank is told
where its own piece lies; else each is told where all of them lie and which rows of the whole are its own, and joins and cuts them
itself. What is cut beside them is cut at the same rows.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from twinkle_core.mesh import DeviceMesh
from twinkle_core.remote import RemoteMark
from twinkle_core.remote.collect import needed_ranks
from twinkle_core.remote.dispatch import Call, dispatch, map_lists, partition_units, piece_of, pieces_of
from twinkle_core.remote.marks import Dispatch
from twinkle_ray.group import ActorGroup
from twinkle_ray.lazy import LazyResult, Result, is_lazy, result_of
from twinkle_ray.messages import Component, Parcel, Request, Site


def call_group(
    ranks: ActorGroup, component: Component, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], mark: RemoteMark, *,
    data_states: list[dict[str, Any]] | None, leaves_results: bool,
) -> Any:
    """Call a method of a component; return what is collected of the results, or a `LazyResult`."""
    mesh, is_first = component.mesh, mark.execute == "first"
    calls = dict(enumerate(_cut(mark.dispatch, args, kwargs, mesh)))
    wanted = [0] if is_first else needed_ranks(mark.collect, mesh, dispatch=mark.dispatch)
    request = Request(component=component.number, method=method, data_states=data_states, is_lazy=leaves_results)
    pending = ranks.submit(request, {0: calls[0]} if is_first else calls, wanted=wanted, site=Site.here(),
                           what=f"`{component.cls.__name__}.{method}`")
    result = Result(pending, wanted, None if is_first else mark.collect, mesh)
    if not leaves_results:
        return result.value()
    if mark.sync:
        pending.wait()
    return LazyResult(result)


@dataclass(frozen=True)
class _Slot:
    """Where a lazy result stands among arguments while they are cut."""

    result: Result


def _cut(how: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh) -> list[Call]:
    """Return the arguments of every rank, with `Parcel`s in place of lazy results."""
    lazy: list[Result] = []

    def slot(value: Any) -> Any:
        result = result_of(value)
        if callable(how) or not result.is_portable:
            return result.value()
        lazy.append(result)
        return _Slot(result)

    call = _replace((args, kwargs), is_lazy, slot)
    if not lazy:
        return dispatch(how, *call, mesh)
    if how == "all":
        whole = _replace(call, _is_slot, lambda found: Parcel(refs=found.result.refs(), how=found.result.how))
        return dispatch(how, *whole, mesh)
    pieces = pieces_of(how, mesh)
    bounds, is_aligned = _bounds(call, lazy, pieces)
    if bounds is None:
        return dispatch(how, *_replace(call, _is_slot, lambda found: found.result.value()), mesh)
    cut: dict[int, Call] = {}
    for rank, part in enumerate(dispatch(how, *call, mesh, bounds=bounds)):
        piece = piece_of(how, mesh, rank)
        if piece not in cut:
            cut[piece] = _replace(part, _is_slot, lambda found, piece=piece: _parcel(found.result, piece, bounds, is_aligned))
    return [cut[piece_of(how, mesh, rank)] for rank in range(mesh.world_size)]


def _bounds(call: Call, lazy: list[Result], pieces: int) -> tuple[list[range] | None, bool]:
    """Return the rows of each piece, None if only the script can cut; and whether each rank's piece lies there as it is."""
    lists: list[Any] = []
    map_lists(call, lambda rows: rows, found=lists)
    is_aligned = all(result.pieces == pieces for result in lazy)
    if is_aligned and len(lazy) == 1 and not lists:
        return [range(0)] * pieces, True  # nobody needs to know how long they are, so nobody waits for the call
    units = [result.units() for result in lazy]
    known = [found for found in units if found is not None]
    if len(known) < len(units):
        return None, False
    lengths = [[piece[-1] for piece in found] for found in known]
    if is_aligned and all(other == lengths[0] for other in lengths):
        ends = list(itertools.accumulate(lengths[0]))
        return [range(end - length, end) for end, length in zip(ends, lengths[0], strict=True)], True
    starts, total = [], 0
    for piece in known[0]:
        starts += [total + start for start in piece[:-1]]
        total += piece[-1]
    if any(sum(other) != total for other in lengths):
        return None, False  # an error, which names the lengths
    return partition_units(starts, total, pieces), False


def _parcel(result: Result, piece: int, bounds: list[range], is_aligned: bool) -> Parcel:
    if is_aligned:
        return Parcel(refs=[result.refs()[piece]], is_sliced=True)
    return Parcel(refs=result.refs(), how=result.how, rows=bounds[piece], is_sliced=True)


def _is_slot(value: Any) -> bool:
    return type(value) is _Slot


def _replace(call: Call, is_meant: Callable[[Any], bool], function: Callable[[Any], Any]) -> Call:
    """Return a call with `function` of every argument that is meant, in nested dicts too."""

    def walk(value: Any) -> Any:
        if is_meant(value):
            return function(value)
        return {key: walk(item) for key, item in value.items()} if type(value) is dict else value

    args, kwargs = call
    return tuple(walk(value) for value in args), {name: walk(value) for name, value in kwargs.items()}
