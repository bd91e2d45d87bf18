"""In which order an epoch visits the rows, and which rows of a batch a rank gets. Pure arithmetic."""

from collections.abc import Sequence

from twinkle_core.remote.dispatch import partition


def epoch_order(rows: int, *, shuffle: bool, seed: int, epoch: int) -> Sequence[int]:
    """Return the row numbers in the order of an epoch; each of range(rows) stands in it once.

    Shuffled: row numbers sorted by one 64-bit number a row, drawn from PCG64 seeded with (seed, epoch). numpy guarantees the raw
    stream of a bit generator, but not that of `permutation`, and a resumed run must see the same order under another numpy.
    """
    if not shuffle:
        return range(rows)
    import numpy as np

    raw = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(rows)
    return [int(row) for row in np.argsort(raw, kind="stable")]


def batches(order: Sequence[int], batch_size: int, *, begin: int = 0) -> list[Sequence[int]]:
    """Return the batches of an epoch from position `begin` on. The last one holds what is left, so it may be smaller."""
    return [order[start:start + batch_size] for start in range(begin, len(order), batch_size)]


def slice_of(batch: Sequence[int], data_rank: int, data_world_size: int) -> Sequence[int]:
    """Return the rows of a batch that a data rank gets: what `slice_dp` would give it. It may be empty."""
    rows = partition(len(batch), data_world_size)[data_rank]
    return batch[rows.start:rows.stop]
