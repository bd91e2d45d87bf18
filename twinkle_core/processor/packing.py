"""Laying sequences of different lengths into rows.

Attention over a row of L positions costs L squared, so a long batch goes into several rows of a bounded length, filled by the
first-fit-decreasing rule (Johnson 1973); a short one fits into one row and has no padding at all.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

SINGLE_ROW = 512
"""Up to so many tokens, one row. In a 135M model of 576 dimensions attention over 512 tokens is about a tenth of the arithmetic."""


def pack_rows(
    lengths: Sequence[int], *, longest_row: int | None = SINGLE_ROW,
) -> tuple[list[int], int, npt.NDArray[np.int64]]:
    """Return where each sequence begins in the flattened rows, the length of a row, and the positions [R, L].

    Positions restart at 0 with each sequence, and in the padding at every token, so that nothing attends across.

    Args:
        lengths: of the sequences, >= 1.
        longest_row: rows are at most this long, or as long as the longest sequence; None: everything in one row.
    """
    limit = sum(lengths) if longest_row is None else min(sum(lengths), max(longest_row, *lengths))
    fill: list[int] = []
    places: list[tuple[int, int]] = [(0, 0)] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        row = next((row for row, used in enumerate(fill) if used + lengths[index] <= limit), len(fill))
        if row == len(fill):
            fill.append(0)
        places[index] = (row, fill[row])
        fill[row] += lengths[index]
    width = max(fill)
    positions = np.zeros((len(fill), width), np.int64)
    for (row, start), length in zip(places, lengths, strict=True):
        positions[row, start:start + length] = np.arange(length)
    return [row * width + start for row, start in places], width, positions
