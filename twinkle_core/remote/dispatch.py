"""Which arguments each rank of a group gets: pure functions over (arguments, mesh), without torch and without processes.

`all` gives every rank everything. `slice` cuts lists into one piece a rank, `slice_dp` into one piece a data rank, so that
ranks which differ in tp or pp only get the same piece. Pieces are contiguous and in order, and their lengths differ by at most
one; a rank may get an empty list. A list is cut wherever it stands, in nested dicts too; what is not a list goes to every rank.

A list of `SampleResponse` is first flattened to one feature a sequence. The two features of a preference pair stay together.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from twinkle_core.data_format import flatten_responses
from twinkle_core.errors import ArgumentError
from twinkle_core.mesh import DeviceMesh
from twinkle_core.remote.marks import Dispatch

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and keyword arguments of one rank."""


def dispatch(
    how: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh, *, bounds: list[range] | None = None,
) -> list[Call]:
    """Return the arguments of every rank of `mesh`, in the order of the ranks.

    A function as `how` is called as `how(args, kwargs, mesh)` and returns this list itself. `bounds` are the rows of each piece,
    where something that is cut elsewhere decides them.

    Raises: `ArgumentError` if lists that are cut together differ in length, or a function returns a wrong number of calls.
    """
    if callable(how):
        calls = list(how(args, kwargs, mesh))
        if len(calls) != mesh.world_size:
            raise ArgumentError(f"The dispatch function `{getattr(how, '__name__', how)}` returned {len(calls)} calls for "
                                f"{mesh.world_size} ranks. Return one (args, kwargs) a rank.")
        return calls
    if how == "all":
        return [(args, kwargs)] * mesh.world_size
    args, kwargs = map_lists((args, kwargs), flatten_responses)
    bounds = _bounds((args, kwargs), pieces_of(how, mesh), known=bounds)
    cut = [cut_lists((args, kwargs), rows) for rows in bounds]
    return [cut[piece_of(how, mesh, rank)] for rank in range(mesh.world_size)]


def pieces_of(how: Dispatch, mesh: DeviceMesh) -> int:
    """Return into how many different sets of arguments a call on `mesh` falls."""
    return 1 if how == "all" else mesh.data_world_size if how == "slice_dp" else mesh.world_size


def piece_of(how: Dispatch, mesh: DeviceMesh, rank: int) -> int:
    """Return which of these sets `rank` gets."""
    return 0 if how == "all" else mesh.data_rank(rank) if how == "slice_dp" else rank


def partition(length: int, pieces: int) -> list[range]:
    """Return `pieces` contiguous ranges that cover range(length) in order; their lengths differ by at most one."""
    starts = [length * piece // pieces for piece in range(pieces + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def partition_rows(items: list[Any], pieces: int) -> list[range]:
    """Return `pieces` contiguous ranges of `items` that never part the two features of a preference pair."""
    return partition_units(unit_starts(items), len(items), pieces)


def unit_starts(items: list[Any]) -> list[int]:
    """Return the positions at which `items` may be cut: all but before the second feature of a preference pair."""
    starts = [0] if items else []
    for index in range(1, len(items)):
        pair = _pair_id(items[index])
        if pair is None or pair != _pair_id(items[index - 1]):
            starts.append(index)
    return starts


def partition_units(starts: Sequence[int], length: int, pieces: int) -> list[range]:
    """Return `pieces` contiguous ranges that cover range(length) in order and begin at some of `starts`."""
    ends = [*starts[1:], length]
    return [range(starts[rows.start], ends[rows.stop - 1]) if rows else range(0) for rows in partition(len(starts), pieces)]


def _pair_id(item: Any) -> Any:
    return cast("Mapping[str, Any]", item).get("pair_id") if isinstance(item, Mapping) else None


def _bounds(call: Call, pieces: int, *, known: list[range] | None = None) -> list[range]:
    lists: list[tuple[str, list[Any]]] = []
    map_lists(call, lambda value: value, found=lists)
    if known is not None:
        for name, found in lists:
            if len(found) != known[-1].stop:
                raise ArgumentError(_lengths_differ(name, len(found), "what another component returned", known[-1].stop))
        return known
    if not lists:
        raise ArgumentError("Nothing to slice: no argument is a list. Pass the batch as a list.")
    first_name, first = lists[0]
    for name, other in lists[1:]:
        if len(other) != len(first):
            raise ArgumentError(_lengths_differ(name, len(other), first_name, len(first)))
    return partition_rows(first, pieces)


def _lengths_differ(name: str, length: int, other_name: str, other_length: int) -> str:
    return (f"{name} has {length} entries, {other_name} has {other_length}. What is sliced together needs one entry for each "
            "sequence (a `SampleResponse` counts once a sequence).")


def cut_lists(call: Call, rows: range) -> Call:
    """Return a call with these rows of every list."""
    return map_lists(call, lambda value: value[rows.start:rows.stop])


def map_lists(
    call: Call, function: Callable[[list[Any]], Any], *, found: list[tuple[str, list[Any]]] | None = None,
) -> Call:
    """Return `call` with every list, in nested dicts too, replaced by `function(list)`; append (name, list) to `found`."""

    def walk(value: Any, name: str) -> Any:
        if isinstance(value, list):
            rows = cast("list[Any]", value)
            if found is not None:
                found.append((name, rows))
            return function(rows)
        if isinstance(value, dict):
            return {key: walk(item, f"{name}[{key!r}]") for key, item in cast("dict[Any, Any]", value).items()}
        return value

    args, kwargs = call
    return (tuple(walk(value, f"Argument {index}") for index, value in enumerate(args)),
            {name: walk(value, f"`{name}`") for name, value in kwargs.items()})
