"""Token ids and labels as arrays, held against what the model can read before it reads anything.

Comparisons are made once a batch; which row is the wrong one is looked for only when there is one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from twinkle_core.data_format import IGNORE_INDEX, InputFeature
from twinkle_core.errors import DataError

if TYPE_CHECKING:
    import numpy.typing as npt

    Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a model can read.

    Attributes:
        vocab_size: token ids are below it.
        positions: tokens of a sequence at most, or None.
    """

    vocab_size: int
    positions: int | None

    @classmethod
    def of(cls, config: Any) -> "Limits":
        """Return the limits that a Hugging Face configuration says."""
        text = config.get_text_config()
        return cls(vocab_size=text.vocab_size, positions=getattr(text, "max_position_embeddings", None))


def place_of(index: int, feature: InputFeature) -> str:
    """Return how errors name a sequence: its place in `inputs`, and its row in the dataset if it says one."""
    row = feature.get("row_id")
    return f"inputs[{index}]" if row is None else f"inputs[{index}] (row {row})"


def integers(values: Any, *, where: str, key: str) -> "Int64Array":
    """Return ids or labels [T] as an array. Raises: `DataError` naming the first that is no integer."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError):
        array = np.empty(0, object)
    if array.ndim == 1 and array.dtype.kind in "iu":
        return array.astype(np.int64, copy=False)
    for place, value in enumerate(values):
        if not isinstance(value, Integral):
            raise DataError(f"{where}: `{key}[{place}]` is {value!r} of type {type(value).__name__}. Use integers: ids of tokens, "
                            "as `Dataset.encode()` or `Template.encode()` make them.")
    raise DataError(f"{where}: `{key}` is a {type(values).__name__} that is no list of integers of 64 bits. Use a list of token "
                    "ids, as `Dataset.encode()` or `Template.encode()` make them.")


def check_limits(features: Sequence[InputFeature], limits: Limits) -> None:
    """Raise `DataError` with row, value and what is allowed, unless a model with `limits` can read all of `features`.

    `features` hold arrays.
    """
    if not features:
        return
    ids = np.concatenate([feature["input_ids"] for feature in features])
    labels = np.concatenate([feature["labels"] for feature in features])  # type: ignore[typeddict-item]
    if _wrong(ids, limits).any() or _wrong_labels(labels, limits).any():
        for index, feature in enumerate(features):
            _name_wrong(index, feature, limits)
    if limits.positions is not None and max(len(feature["input_ids"]) for feature in features) > limits.positions:
        index, long = next((i, f) for i, f in enumerate(features) if len(f["input_ids"]) > limits.positions)
        raise DataError(f"{place_of(index, long)} has {len(long['input_ids'])} tokens, but the model has {limits.positions} "
                        "positions (`max_position_embeddings`). Shorten it, e.g. by the template's "
                        f"`max_length={limits.positions}` and `truncation_strategy`.")


def _wrong(ids: "Int64Array", limits: Limits) -> "npt.NDArray[np.bool_]":
    return (ids < 0) | (ids >= limits.vocab_size)


def _wrong_labels(labels: "Int64Array", limits: Limits) -> "npt.NDArray[np.bool_]":
    return _wrong(labels, limits) & (labels != IGNORE_INDEX)


def _name_wrong(index: int, feature: InputFeature, limits: Limits) -> None:
    ignored = f", or {IGNORE_INDEX} where nothing is trained on"
    for key, wrong, also in (("input_ids", _wrong, ""), ("labels", _wrong_labels, ignored)):
        places = np.flatnonzero(wrong(feature[key], limits))  # type: ignore[literal-required,arg-type]
        if places.size:
            value = feature[key][places[0]]  # type: ignore[literal-required]
            raise DataError(f"{place_of(index, feature)}: `{key}[{places[0]}]` is {value}, but the model's vocabulary is 0 to "
                            f"{limits.vocab_size - 1}{also}. Encode it with the tokenizer of this model.")
