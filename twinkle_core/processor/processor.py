"""`InputProcessor`: features (plain lists) in, micro-batches (tensors) out.

Here, and nowhere else, labels are shifted: position t gets `labels[t + 1]` as its target, and the last position none. Rows are
padded on the right, where causal attention never looks, so no mask is needed. Which devices and dtypes there are, and what the
model does with a row, is left to the model.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from twinkle_core.data_format import IGNORE_INDEX, InputFeature, check_feature
from twinkle_core.errors import ArgumentTypeError, DataError, check_count, check_flag, check_keywords
from twinkle_core.processor.micro_batch import Alternatives, MicroBatch
from twinkle_core.processor.packing import ROW_COST, pack_rows
from twinkle_core.processor.tokens import Limits, check_limits, integers, place_of

if TYPE_CHECKING:
    import numpy.typing as npt

    Int64Array = npt.NDArray[np.int64]


_NUMBERS = ("advantages", "old_logprobs", "sampler_logprobs", "ref_logprobs", "rewards")
"""Inputs of a loss that are numbers in every loss; what a loss of one's own calls otherwise may be anything."""

_ADVICE = "Pass one number a sequence, or one a token as `ModelOutput.logprobs` has them."


class InputProcessor:
    """Cuts a batch into micro-batches and collates them. Subclass it and override `prepare` to change features first.

    Args:
        micro_batch_size: rows (a preference pair is one row) a rank runs at once; None: all of them.
        packing: lay several sequences in one row, without padding between them.
        pad_token_id: what fills rows; never trained on and never attended to.
    """

    def __init__(self, *, micro_batch_size: int | None = None, packing: bool = False, pad_token_id: int = 0) -> None:
        check_count("micro_batch_size", micro_batch_size, least=1, none="for all rows at once")
        check_flag("packing", packing)
        check_count("pad_token_id", pad_token_id, least=0)
        self.micro_batch_size, self.packing, self.pad_token_id = micro_batch_size, packing, pad_token_id
        self.row_cost: float | None = ROW_COST  # of `pack_rows`; the model drops it where attention skips what is masked

    def prepare(self, features: Sequence[InputFeature]) -> Sequence[InputFeature]:
        """Return the features to train on, by default the same. The number and order of sequences must stay."""
        return features

    def micro_batches(
        self, features: Sequence[Any], loss_inputs: Mapping[str, Any] | None = None, *, device: str = "cpu",
        limits: Limits | None = None,
    ) -> Iterator[MicroBatch]:
        """Yield micro-batches in the order of `features`; none if there are none.

        Raises: `DataError`, before the first, for a feature of the wrong shape, without labels or beyond `limits`, and for a loss
            input of another length.
        """
        checked = self._check(features, limits)
        inputs = _split_inputs(loss_inputs or {}, checked)
        for rows in self._cut(checked):
            part = {name: value[rows.start:rows.stop] if is_sliced else value for name, (value, is_sliced) in inputs.items()}
            yield self.collate(checked[rows.start:rows.stop], part, device=device)

    def collate(self, features: Sequence[InputFeature], loss_inputs: Mapping[str, Any], *, device: str) -> MicroBatch:
        """Return the tensors of `features`."""
        import torch

        def tensor(array: "npt.NDArray[Any]") -> torch.Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        lengths = [len(feature["input_ids"]) for feature in features]
        longest = max(lengths)
        targets_bt = np.full((len(features), longest), IGNORE_INDEX, np.int64)
        for row, feature in enumerate(features):
            targets_bt[row, : lengths[row] - 1] = feature["labels"][1:]  # type: ignore[typeddict-item]
        place_n = np.flatnonzero(targets_bt != IGNORE_INDEX)
        if self.packing:
            offsets, row_length, position_ids = pack_rows(lengths, row_cost=self.row_cost)
            source_n = np.asarray(offsets, np.int64)[place_n // longest] + place_n % longest
        else:
            offsets, row_length, position_ids, source_n = [row * longest for row in range(len(features))], longest, None, place_n
        count = len(features) if position_ids is None else position_ids.shape[0]
        ids = np.full(count * row_length, self.pad_token_id, np.int64)
        for offset, length, feature in zip(offsets, lengths, features, strict=True):
            ids[offset:offset + length] = feature["input_ids"]
        place_n, source_n = _by_source(place_n, source_n) if self.packing else (place_n, source_n)
        return MicroBatch(
            input_ids_RL=tensor(ids.reshape(count, row_length)),
            position_ids_RL=None if position_ids is None else tensor(position_ids),
            targets_BT=tensor(targets_bt), source_N=tensor(source_n), place_N=tensor(place_n),
            targets_N=tensor(targets_bt.reshape(-1)[place_n]), lengths=lengths,
            row_ids=[feature.get("row_id") for feature in features],
            loss_inputs={name: _tensor_of(value, lengths, longest, device) for name, value in loss_inputs.items()})

    def _check(self, features: Sequence[Any], limits: Limits | None) -> list[InputFeature]:
        """Return the features to train on, their ids and labels as arrays."""
        checked = [check_feature(feature, where=f"inputs[{index}]") for index, feature in enumerate(features)]
        prepared = list(self.prepare(checked))
        if len(prepared) != len(checked):
            raise DataError(f"`{type(self).__name__}.prepare` returned {len(prepared)} features for {len(checked)}. Return one for "
                            "each, in order.")
        for index, feature in enumerate(prepared):
            if "labels" not in feature:
                raise DataError(f"inputs[{index}] has no `labels`, so nothing says what to train on or to score. Encode it without "
                                "`add_generation_prompt`, or give it `labels` (-100 where a token is ignored).")
            if type(self).prepare is not InputProcessor.prepare:
                check_feature(feature, where=f"`{type(self).__name__}.prepare`: inputs[{index}]")
            where = place_of(index, feature)
            prepared[index] = cast(InputFeature, {
                **feature, **{key: integers(feature[key], where=where, key=key) for key in ("input_ids", "labels")}})
        if limits is not None:
            check_limits(prepared, limits)
        return prepared

    def _cut(self, features: Sequence[InputFeature]) -> Iterator[range]:
        size, start, rows = self.micro_batch_size or len(features), 0, 0
        for index, feature in enumerate(features):
            pair = feature.get("pair_id")
            if index and pair is not None and pair == features[index - 1].get("pair_id"):
                continue
            if rows == size:
                yield range(start, index)
                start, rows = index, 0
            rows += 1
        if features:
            yield range(start, len(features))


def build_processor(value: Any, options: Mapping[str, Any]) -> InputProcessor:
    """Return the processor that `set_processor(value, **options)` means: a class, an instance, or None for `InputProcessor`.

    Raises: `ArgumentTypeError` for anything else, and for options together with an instance.
    """
    if isinstance(value, InputProcessor):
        if set(options) - {"micro_batch_size", "packing"} or options.get("micro_batch_size") is not None or options.get("packing"):
            raise ArgumentTypeError("`set_processor` got an instance together with options. Pass them when you make the processor.")
        return value
    if value is not None and not (inspect.isclass(value) and issubclass(value, InputProcessor)):
        raise ArgumentTypeError(f"`set_processor` got {value!r} of type {type(value).__name__}. Pass a subclass or an instance of "
                                "`InputProcessor`, or only options such as `micro_batch_size=4`.")
    cls = value or InputProcessor
    parameters = inspect.signature(cls).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        check_keywords("set_processor", options, parameters)
    return cls(**options)


def _by_source(place_n: "Int64Array", source_n: "Int64Array") -> tuple["Int64Array", "Int64Array"]:
    order = np.argsort(source_n, kind="stable")
    return place_n[order], source_n[order]


def _split_inputs(loss_inputs: Mapping[str, Any], features: Sequence[InputFeature]) -> dict[str, tuple[Any, bool]]:
    """Return name -> (value, whether it has one entry a sequence)."""
    split: dict[str, tuple[Any, bool]] = {}
    for name, value in loss_inputs.items():
        if hasattr(value, "tolist"):
            value = value.tolist()
        if not isinstance(value, list | tuple):
            if name in _NUMBERS and value is not None:
                raise DataError(f"`{name}` is {_short(value)}. {_ADVICE}")
            split[name] = (value, False)
            continue
        if len(value) != len(features):
            raise DataError(f"`{name}` has {len(value)} entries, `inputs` has {len(features)} sequences. Pass one entry a "
                            "sequence.")
        entries = [entry.tolist() if hasattr(entry, "tolist") else entry for entry in value]
        split[name] = (_checked(name, entries, features), True)
    return split


def _checked(name: str, value: Sequence[Any], features: Sequence[InputFeature]) -> Sequence[Any]:
    """Return what a loss gets for each sequence: numbers, arrays with a number a token, or other values as they are."""
    like = next((index for index, entry in enumerate(value) if isinstance(entry, int | float | list | tuple)), None)
    if any(_holds_mappings(entry) for entry in value):
        return _checked_alternatives(name, value, features)
    if like is None:
        if value and name in _NUMBERS:
            raise DataError(f"`{name}[0]` is {_short(value[0])}. {_ADVICE}")
        return value
    one_a_token = isinstance(value[like], list | tuple)
    checked: list[Any] = []
    for index, entry in enumerate(value):
        try:
            numbers = np.asarray(entry)
        except (ValueError, TypeError, OverflowError):
            numbers = np.asarray(None)
        if numbers.ndim != one_a_token or numbers.dtype.kind not in "fiub":
            other = "" if index == like else f" where `{name}[{like}]` is {_short(value[like])}"
            raise DataError(f"`{name}[{index}]` is {_short(entry)}{other}. {_ADVICE}")
        length = len(features[index]["input_ids"])
        if one_a_token and len(numbers) != length:
            raise DataError(f"`{name}[{index}]` has {len(numbers)} entries, the sequence has {length} tokens. {_ADVICE}")
        checked.append(numbers if one_a_token else entry)
    return checked


def _holds_mappings(entry: Any) -> bool:
    return isinstance(entry, list | tuple) and bool(entry) and isinstance(entry[0], Mapping)


def _checked_alternatives(name: str, value: Sequence[Any], features: Sequence[InputFeature]) -> Sequence[Any]:
    """Return for each sequence one dict a token, token id -> log-probability."""
    for index, (entry, feature) in enumerate(zip(value, features, strict=True)):
        if not isinstance(entry, list | tuple) or not all(isinstance(item, Mapping) for item in entry):
            raise DataError(f"`{name}[{index}]` is {_short(entry)}. Pass one dict a token, token id -> log-probability, as "
                            "`ModelOutput.top_logprobs` has them.")
        if len(entry) != len(feature["input_ids"]):
            raise DataError(f"`{name}[{index}]` has {len(entry)} entries, the sequence has {len(feature['input_ids'])} tokens. "
                            "Pass one dict a token, {} where it is not supervised.")
    return value


def _short(entry: Any) -> str:
    text = repr(entry)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _tensor_of(value: Any, lengths: Sequence[int], longest: int, device: str) -> Any:
    """Return numbers a sequence as [B], numbers a token as [B, T] at the position that predicts the token, dicts a token as
    `Alternatives` there; else the value."""
    import torch

    if not isinstance(value, list | tuple) or not value:
        return value
    if _holds_mappings(value[0]):
        return _alternatives(value, longest, device)
    if not isinstance(value[0], list | tuple | np.ndarray):
        return torch.tensor(value, dtype=torch.float32, device=device) if isinstance(value[0], int | float) else value
    array = np.zeros((len(value), longest), np.float32)
    for row, (numbers, length) in enumerate(zip(value, lengths, strict=True)):
        array[row, : length - 1] = numbers[1:]
    return torch.from_numpy(array).to(device)


def _alternatives(value: Sequence[Sequence[Mapping[int, float]]], longest: int, device: str) -> Alternatives:
    import torch

    width = max(1, *(len(here) for entry in value for here in entry))
    ids = np.zeros((len(value), longest, width), np.int64)
    logprobs = np.full(ids.shape, -np.inf, np.float32)
    for row, entry in enumerate(value):
        for position, here in enumerate(entry[1:]):
            ids[row, position, :len(here)] = list(here.keys())
            logprobs[row, position, :len(here)] = list(here.values())
    return Alternatives(ids=torch.from_numpy(ids).to(device), logprobs=torch.from_numpy(logprobs).to(device))
