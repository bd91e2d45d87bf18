"""Weaves datasets into one and splits one into two, with the `datasets` library and seeds."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

from twinkle_core.dataset import table as tables
from twinkle_core.errors import ArgumentError, DataError, listing

if TYPE_CHECKING:
    import datasets

_MOST_REPEATS = 1000
"""Rows of a mixture for each row there is; more is a slip in the probabilities."""

StoppingStrategy = Literal["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"]


def mix(
    parts: Sequence["datasets.Dataset"],
    *,
    interleave: bool,
    probabilities: Sequence[float] | None = None,
    strategy: StoppingStrategy = "all_exhausted_without_replacement",
    seed: int = 0,
) -> "datasets.Dataset":
    """Return one dataset of the rows of all `parts`: one after the other, in turn, or drawn with `probabilities`.

    Raises: `ArgumentError` for probabilities that do not fit; `DataError` for parts whose rows are of different kinds.
    """
    check_seed(seed)
    if strategy not in get_args(StoppingStrategy):
        raise ArgumentError(f"`stopping_strategy={strategy!r}`: use one of {listing(get_args(StoppingStrategy))}.")
    if probabilities is not None:
        _check_probabilities(probabilities, len(parts), interleave)
    if len(parts) == 1:
        return parts[0]
    library = tables.import_datasets()
    aligned = _aligned(parts)
    if not interleave:
        return tables.as_part(library.concatenate_datasets(aligned))
    weights = None if probabilities is None else [float(p) for p in probabilities]
    if weights is not None and strategy == "all_exhausted":
        _check_length(parts, weights)
    return tables.as_part(library.interleave_datasets(aligned, probabilities=weights, seed=seed, stopping_strategy=strategy))


def check_seed(seed: object) -> None:
    """Raise `ArgumentError` unless `seed` can seed a generator of numpy."""
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ArgumentError(f"`seed={seed!r}`: use an integer >= 0.")


def _check_probabilities(probabilities: Sequence[float], parts: int, interleave: bool) -> None:
    if not interleave:
        raise ArgumentError("`probabilities` draw the part of each row, which `interleave=False` does not do. Leave one of them "
                            "out.")
    are_positive = all(isinstance(p, int | float) and p > 0 for p in probabilities)  # NaN is not
    if len(probabilities) != parts or not are_positive or abs(sum(probabilities) - 1) > 1e-6:
        raise ArgumentError(f"`probabilities={list(probabilities)}`: use {parts} numbers > 0, one for each dataset added, with the "
                            "sum 1. Do not add a dataset that is never drawn.")


def _check_length(parts: Sequence["datasets.Dataset"], weights: Sequence[float]) -> None:
    """Raise `ArgumentError` if drawing until every part is used up would repeat the others out of all proportion."""
    expected, total = max(len(part) / weight for part, weight in zip(parts, weights, strict=True)), sum(map(len, parts))
    if expected > _MOST_REPEATS * total:
        raise ArgumentError(f"`probabilities={list(weights)}` with `stopping_strategy=\"all_exhausted\"` would draw about "
                            f"{expected:.2g} rows from datasets of {total}, before the last is used up. Use larger probabilities "
                            "for the small ones, or another strategy.")


def _aligned(parts: Sequence["datasets.Dataset"]) -> list["datasets.Dataset"]:
    """The parts with the same columns of the same types."""
    columns = [set(tables.visible_columns(part)) - {"user_data"} for part in parts]
    if any(other != columns[0] for other in columns[1:]):
        kinds = "; ".join(f"({', '.join(sorted(names))})" for names in columns)
        raise DataError(f"The datasets to mix have different columns: {kinds}. Bring them into one shape with `map`, or call "
                        "`encode` before `mix_dataset`.")
    whole = tables.join([tables.arrow_rows(part, slice(None)) for part in parts])
    ends, aligned = 0, []
    for part in parts:
        aligned.append(tables.dataset_of(whole.slice(ends, len(part))))
        ends += len(part)
    return aligned


def split_positions(length: int, test_size: float | int, seed: int) -> tuple[list[int], list[int]]:
    """Return the row numbers of the two halves of a split, each in order. Raises: `ArgumentError` if one would be empty."""
    import numpy as np

    check_seed(seed)
    is_fraction = isinstance(test_size, float)
    if isinstance(test_size, bool) or not isinstance(test_size, int | float) or not 0 < test_size < (1 if is_fraction else length):
        raise ArgumentError(f"`test_size={test_size!r}`: use a fraction between 0 and 1, or a count from 1 to {length - 1} "
                            f"(the dataset has {length} rows).")
    count = min(max(1, round(length * test_size)), length - 1) if is_fraction else int(test_size)
    if count < 1:
        raise ArgumentError(f"`test_size={test_size!r}`: a dataset of {length} row cannot be split. Add rows.")
    drawn = np.argsort(np.random.PCG64(np.random.SeedSequence([seed, length])).random_raw(length), kind="stable")[:count]
    test = sorted(int(position) for position in drawn)
    taken = set(test)
    return [position for position in range(length) if position not in taken], test
