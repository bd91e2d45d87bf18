"""From rows of a dataset to the items of a batch."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle_core.dataset import Dataset
from twinkle_core.errors import DataError, listing

SIDES = ("chosen", "rejected")


def items_of(dataset: Any, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Return the features of `rows`, in order; two for a preference row, the chosen one first. Conversations stay as they are.

    Raises: `DataError` for a row that is neither tokens nor a conversation.
    """
    if not rows:
        return []
    examples = dataset.examples_at(list(rows)) if isinstance(dataset, Dataset) else [dataset[row] for row in rows]
    items: list[dict[str, Any]] = []
    for row, example in zip(rows, examples, strict=True):
        items += _items(example, row)
    return items


def _items(example: Any, row: int) -> list[dict[str, Any]]:
    if isinstance(example, Mapping):
        if "input_ids" in example:
            return [{**example, "row_id": row}]
        if "messages" in example:
            return [dict(example)]
        if all(isinstance(example.get(side), Mapping) and "input_ids" in example[side] for side in SIDES):
            shared = {name: value for name, value in example.items() if name not in SIDES} | {"row_id": row, "pair_id": row}
            return [{**example[side], **shared} for side in SIDES]
    keys = listing(map(str, example)) if isinstance(example, Mapping) else f"a {type(example).__name__}"
    raise DataError(f"Row {row} of the data loader's dataset is neither tokens (`input_ids`) nor a conversation (`messages`), but "
                    f"{keys}. Call `dataset.encode()` first.")
