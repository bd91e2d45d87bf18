"""Laying sequences of different lengths into rows.

Attention over a row of L positions costs L squared, a row that is not full costs its padding: the number of rows is the one that
costs least together. Sequences go, the longest first, into the row that is emptiest (Graham 1969), so rows are filled alike.
"""

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ROW_COST = 5000
"""Tokens of a row at which attention costs as much as all other arithmetic. In a 135M model of 576 dimensions attention over 512
tokens was a tenth of it; in wider models it is less."""

Row = tuple[int, int]
"""(number of a row, where in it a sequence begins)."""


def pack_rows(
    lengths: Sequence[int], *, row_cost: float | None = ROW_COST,
) -> tuple[list[int], int, npt.NDArray[np.int64]]:
    """Return where each sequence begins in the flattened rows, the length of a row, and the positions [R, L].

    Positions restart at 0 with each sequence, and in the padding at every token, so that nothing attends across.

    Args:
        lengths: of the sequences, >= 1.
        row_cost: tokens of a row at which attention costs as much as the rest; None: attention skips what is masked, so
            everything goes into one row.
    """
    places, fill = _lay(lengths, 1)
    rows = 2
    while row_cost is not None and rows <= len(lengths):
        other = _lay(lengths, rows)
        if _cost(other[1], row_cost) < _cost(fill, row_cost):
            places, fill = other
        if max(other[1]) == max(lengths):  # more rows would not be shorter
            break
        rows += 1 + rows // 4  # every number up to 4, then steps that keep a large batch quick
    width = max(fill)
    positions = np.zeros((len(fill), width), np.int64)
    for (row, start), length in zip(places, lengths, strict=True):
        positions[row, start:start + length] = np.arange(length)
    return [row * width + start for row, start in places], width, positions


def _lay(lengths: Sequence[int], rows: int) -> tuple[list[Row], list[int]]:
    """Return the place of each sequence and how many tokens each row has."""
    fill = [(0, row) for row in range(rows)]  # a heap
    places: list[Row] = [(0, 0)] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        used, row = fill[0]
        places[index] = (row, used)
        heapq.heapreplace(fill, (used + lengths[index], row))
    return places, [used for used, _ in fill]


def _cost(fill: Sequence[int], row_cost: float | None) -> float:
    width = max(fill)
    return len(fill) * width * (1 + width / (row_cost or float("inf")))
