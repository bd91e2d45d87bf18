"""What becomes of the results of the ranks: pure functions over (results, mesh), the counterparts of `dispatch`.

`none` keeps the list of all, `first` takes rank 0's, `last_pp` the first rank's of the last pipeline stage. `flatten`, `mean`
and `sum` take one result for each piece that the dispatch made - after `slice_dp` and `all` one a data rank (from the last
stage), after `slice` one a rank - so nothing is counted twice. They go into dicts, key by key.

`flatten` joins lists in the order of the pieces, so `flatten(slice_dp(x)) == x` on every mesh; of what is not a list all
ranks hold the same, and it takes the first.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from twinkle_core.errors import ArgumentError
from twinkle_core.mesh import DeviceMesh
from twinkle_core.remote.marks import Collect, Dispatch


def collect(how: Collect, results: Sequence[Any], mesh: DeviceMesh, *, dispatch: Dispatch) -> Any:
    """Return what the caller gets of the ranks' `results`, which are in the order of the ranks.

    A function as `how` is called as `how(results, mesh)`.

    Raises: `ArgumentError` if there is not one result a rank, or the ranks' results cannot be joined.
    """
    if len(results) != mesh.world_size:
        raise ArgumentError(f"{len(results)} results were collected from {mesh.world_size} ranks. Pass one a rank.")
    if callable(how):
        return how(list(results), mesh)
    pieces = [results[rank] for rank in needed_ranks(how, mesh, dispatch=dispatch)]
    return join(how, pieces)


def needed_ranks(how: Collect, mesh: DeviceMesh, *, dispatch: Dispatch) -> list[int]:
    """Return the ranks whose results `collect` looks at, in its order; those of the others need not travel."""
    if callable(how) or how == "none":
        return list(range(mesh.world_size))
    if how == "first":
        return [0]
    if how == "last_pp":
        return [mesh.rank(pp=mesh.pp - 1)]
    return list(range(mesh.world_size)) if dispatch == "slice" else mesh.data_representatives()


def join(how: Literal["none", "first", "flatten", "mean", "sum", "last_pp"], pieces: Sequence[Any]) -> Any:
    """Return what the caller gets of the results of the needed ranks."""
    return _JOIN[how](list(pieces)) if how in _JOIN else list(pieces) if how == "none" else pieces[0]


def _flatten(pieces: list[Any]) -> Any:
    first = pieces[0]
    if isinstance(first, Mapping):
        return _by_key(pieces, _flatten)
    if isinstance(first, list | tuple):
        joined = [item for piece in pieces for item in piece]
        return joined if isinstance(first, list) else tuple(joined)
    return first


def _sum(pieces: list[Any]) -> Any:
    if isinstance(pieces[0], Mapping):
        return _by_key(pieces, _sum)
    if pieces[0] is None:
        return None
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    return total


def _mean(pieces: list[Any]) -> Any:
    if isinstance(pieces[0], Mapping):
        return _by_key(pieces, _mean)
    return None if pieces[0] is None else _sum(pieces) / len(pieces)


def _by_key(pieces: list[Any], join: Any) -> dict[Any, Any]:
    mappings = cast("list[Mapping[Any, Any]]", pieces)
    keys = list(mappings[0])
    for mapping in mappings[1:]:
        if set(mapping) != set(keys):
            raise ArgumentError(f"The ranks returned different keys: {sorted(map(str, keys))} and "
                                f"{sorted(map(str, mapping))}. Return the same keys on every rank.")
    return {key: join([mapping[key] for mapping in mappings]) for key in keys}


_JOIN = {"flatten": _flatten, "sum": _sum, "mean": _mean}
