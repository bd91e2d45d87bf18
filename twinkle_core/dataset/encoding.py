"""From rows to tokens, a batch at a time: layout, template, Arrow.

The template does the work (`batch_encode`); this module adds as little as it can to a call. An encoded table has the columns
`input_ids` and `labels`, or for preference rows `chosen` and `rejected`, structs of the two; and `user_data` where rows have any.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from twinkle_core.data_format import IGNORE_INDEX, Trajectory
from twinkle_core.dataset import table as tables
from twinkle_core.dataset.bad_rows import OnBadRow, Place, Tally, each_row
from twinkle_core.dataset.layouts import Example, Layout, prompt_of
from twinkle_core.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

    from twinkle_core.template.template import Template

R = TypeVar("R")
SIDES = ("chosen", "rejected")
Features = list[list[dict[str, Any]]]
"""For each row its features: none if truncation dropped it, several if it was split."""


class Encoder:
    """Encodes batches of rows of one layout."""

    def __init__(self, template: "Template", layout: Layout, *, add_generation_prompt: bool, on_bad_row: OnBadRow) -> None:
        self.template = template
        self.layout = layout
        self.add_generation_prompt = add_generation_prompt
        self.on_bad_row: OnBadRow = on_bad_row

    def __call__(self, batch: "pa.Table", first_row: int) -> tuple["pa.Table", Tally]:
        """Return the encoded table of `batch`, whose first row is row `first_row` of the dataset, and what was left out.

        Raises: `DataError` naming row, file and line, under the policy "raise".
        """
        place, tally = Place(first_row, tables.origins_of(batch)), Tally(seen=batch.num_rows)
        rows = tables.rows_of(batch.select([name for name in batch.column_names if name in self.layout.columns]))
        examples, kept = each_row(rows, self._example, place, tally, on_bad_row=self.on_bad_row, doing="Reading a conversation")
        positions = _Positions(place, kept)
        if self.layout.name == "chosen/rejected" and not self.add_generation_prompt:
            return self._pairs(examples, positions, tally), tally
        return self._features(examples, positions, tally), tally

    def _example(self, row: Mapping[str, Any]) -> Example:
        example = self.layout.example(row)
        return prompt_of(example) if self.add_generation_prompt else example

    def _features(self, examples: list[Example], positions: "_Positions", tally: Tally) -> "pa.Table":
        columns: dict[str, list[Any]] = {"input_ids": [], "labels": [], "user_data": []}
        for example, features in zip(examples, self._encode(examples, positions, tally, self._call), strict=True):
            if features is None:
                continue
            tally.dropped += not features
            for feature in features:
                columns["input_ids"].append(feature["input_ids"])
                columns["labels"].append(_labels(feature))
                columns["user_data"].append(example.get("user_data"))
        return _table({"input_ids": token_column(columns["input_ids"]), "labels": token_column(columns["labels"])},
                      columns["user_data"])

    def _pairs(self, examples: list[Any], positions: "_Positions", tally: Tally) -> "pa.Table":
        kept: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
        pairs = self._encode(examples, positions, tally, self._call_pairs)
        for index, (example, pair) in enumerate(zip(examples, pairs, strict=True)):
            if pair is None:
                continue
            chosen, rejected = pair
            if len(chosen) > 1 or len(rejected) > 1:
                raise DataError(f"In {positions.of(index)} truncation split an answer of a preference row, whose two answers "
                                "belong together. Use another `truncation_strategy` than \"split\".")
            if chosen and rejected:
                kept.append((example.get("user_data"), chosen[0], rejected[0]))
            else:
                tally.dropped += 1
        columns = {side: _struct([row[number] for row in kept]) for number, side in enumerate(SIDES, start=1)}
        return _table(columns, [row[0] for row in kept])

    def _encode(
        self, examples: Sequence[Any], positions: "_Positions", tally: Tally, call: Callable[[Sequence[Any]], Sequence[R]],
    ) -> Sequence[R | None]:
        """What `call` makes of each example; None for a bad row that was skipped."""
        if not examples:
            return []
        try:
            return call(examples)
        except DataError as error:
            row = getattr(error, "row", None)
            if self.on_bad_row == "raise":
                if row is None:
                    raise
                raise positions.error(row, error) from error
        results: list[R | None] = []
        for index, example in enumerate(examples):  # one at a time, to find every bad row
            try:
                results.append(call([example])[0])
            except DataError as error:
                tally.skip(str(error.args[0]), positions.of(index))
                results.append(None)
        return results

    def _call_pairs(self, examples: Sequence[Any]) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
        chosen, rejected = (self._call([example[side] for example in examples]) for side in SIDES)
        return list(zip(chosen, rejected, strict=True))

    def _call(self, examples: Sequence[Any]) -> Features:
        if self.layout.name == "text":
            return cast(Features, self.template.batch_encode_text([example["text"] for example in examples]))
        return cast(Features, self.template.batch_encode(
            cast("list[Trajectory]", examples), add_generation_prompt=self.add_generation_prompt))


class _Positions:
    """Where the examples of a batch stand, after bad rows were left out."""

    def __init__(self, place: Place, kept: Sequence[int]) -> None:
        self._place = place
        self._kept = kept

    def of(self, index: int) -> str:
        return self._place.of(self._kept[index])

    def error(self, index: int, error: Exception) -> Exception:
        return self._place.error(self._kept[index], error, doing="Encoding")


def _labels(feature: Mapping[str, Any]) -> Any:
    labels = feature.get("labels")
    return [IGNORE_INDEX] * len(feature["input_ids"]) if labels is None else labels


def token_column(sequences: Sequence[Sequence[int]]) -> Any:
    """Return lists of token numbers as an Arrow column of 32-bit integers."""
    import pyarrow as pa

    return pa.array(sequences, pa.list_(pa.int32()))


def _struct(features: Sequence[Mapping[str, Any]]) -> Any:
    import pyarrow as pa

    return pa.StructArray.from_arrays(
        [token_column([feature["input_ids"] for feature in features]), token_column([_labels(feature) for feature in features])],
        ["input_ids", "labels"])


def _table(columns: dict[str, Any], user_data: list[Any]) -> "pa.Table":
    import pyarrow as pa

    if any(value is not None for value in user_data):
        columns["user_data"] = tables.json_column(user_data)
    return pa.table(columns)
