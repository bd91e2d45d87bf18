"""The records that travel between components: plain dicts typed as `TypedDict`, and small dataclasses.

    row -> Trajectory -> InputFeature -> micro-batch -> ModelOutput
        preprocessor   template       processor      model

Nothing here needs torch. How a conversation becomes tokens is the template's business, how features become tensors the
processor's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Literal, NotRequired, TypedDict, cast

from twinkle_core.errors import ArgumentError, ArgumentTypeError, DataError, check_keywords, did_you_mean, listing

MOST_SAMPLES = 2**16
"""Completions a prompt in one call: all of them are held in memory."""

IGNORE_INDEX = -100
"""The label of a token that is not trained on (the Hugging Face convention)."""


class ToolCall(TypedDict):
    """One call of a function by the assistant, in the shape of the OpenAI chat API. `arguments` is a dict or its JSON."""

    id: NotRequired[str]
    type: NotRequired[str]
    function: dict[str, Any]


class Message(TypedDict):
    """One turn. `content` is text, or a list of parts `{"type": "text", "text": ...}`."""

    role: str
    content: NotRequired[Any]
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    reasoning_content: NotRequired[str]


class Trajectory(TypedDict):
    """A conversation. `user_data` is carried along untouched, e.g. the reference answer for a reward."""

    messages: list[Message]
    tools: NotRequired[list[dict[str, Any]]]
    user_data: NotRequired[dict[str, Any]]


class InputFeature(TypedDict):
    """One tokenised sequence, made of plain lists.

    `labels` has the length of `input_ids`, is not shifted, and holds -100 where a token is not trained on. `row_id` is the
    position of the row in its dataset. The two features of a preference pair share one `pair_id`, the chosen one first.
    """

    input_ids: list[int]
    labels: NotRequired[list[int]]
    row_id: NotRequired[int]
    pair_id: NotRequired[int]
    user_data: NotRequired[dict[str, Any]]
    old_logprobs: NotRequired[list[float]]


FEATURE_KEYS = frozenset(InputFeature.__annotations__)


class ModelOutput(TypedDict):
    """What `forward_only` and `forward_backward` return.

    `loss` is the token mean over the global batch, `num_tokens` the number of supervised tokens in it. `logprobs[i][t]` is the
    log-probability of `input_ids[t]` of sequence i given what precedes it, 0.0 where it is not supervised (always at t = 0).
    `top_logprobs[i][t]`, where asked for, are those of the likeliest tokens in its place: a dict token -> log-probability, {} where
    it is not supervised.
    """

    loss: float
    num_tokens: int
    logprobs: NotRequired[list[list[float]]]
    top_logprobs: NotRequired[list[list[dict[int, float]]]]


StopReason = Literal["stop", "length"]


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral)


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample. The defaults sample one completion from the model's own distribution.

    Attributes:
        max_tokens: new tokens at most, >= 0; 0 only scores the prompt.
        temperature: >= 0; 0 is greedy.
        top_p: in (0, 1]; 1 is off.
        top_k: tokens kept, or -1 for all.
        seed: reproduces the samples; None draws new ones each time.
        stop: strings that end a completion; the matched text is kept in the tokens and cut from `decoded`.
        num_samples: completions a prompt, from 1 to `MOST_SAMPLES`.
        logprobs: also return this many of the likeliest alternatives at each position. The chosen tokens' own are always there.
        prompt_logprobs: also return the log-probabilities of the prompt's tokens.
        repetition_penalty: > 0; 1 is off. Source: Keskar et al. 2019, sec. 4.1.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    num_samples: int = 1
    logprobs: int = 0
    prompt_logprobs: bool = False
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        said = cast(object, self.stop)  # a dict of fields may hold anything
        stop = tuple(cast("Sequence[object]", said)) if isinstance(said, list | tuple) else () if said is None else (said,)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "top_k", -1 if self.top_k in (None, 0) else self.top_k)
        object.__setattr__(self, "logprobs", int(self.logprobs or 0) if self.logprobs in (None, True, False) else self.logprobs)
        checks = (
            ("max_tokens", _is_integer(self.max_tokens) and self.max_tokens >= 0, "an integer >= 0"),
            ("temperature", _is_number(self.temperature) and self.temperature >= 0, "a number >= 0 (0 is greedy)"),
            ("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1]"),
            ("top_k", _is_integer(self.top_k) and (self.top_k == -1 or self.top_k >= 1), "an integer >= 1, or -1 for all tokens"),
            ("seed", self.seed is None or _is_integer(self.seed), "an integer, or None"),
            ("num_samples", _is_integer(self.num_samples) and 1 <= self.num_samples <= MOST_SAMPLES,
             f"an integer from 1 to {MOST_SAMPLES}; for more, call `sample` several times"),
            ("logprobs", _is_integer(self.logprobs) and self.logprobs >= 0, "an integer >= 0"),
            ("prompt_logprobs", _is_bool(self.prompt_logprobs), "True or False"),
            ("repetition_penalty", _is_number(self.repetition_penalty) and self.repetition_penalty > 0, "a number > 0 (1 is off)"),
            ("stop", all(isinstance(text, str) and text and _is_unicode(text) for text in stop),
             "non-empty strings, without surrogates"),
        )
        for name, is_allowed, allowed in checks:
            if not is_allowed:
                raise ArgumentError(f"`SamplingParams({name}={getattr(self, name)!r})`: use {allowed}.")

    @classmethod
    def of(cls, value: "SamplingParams | Mapping[str, Any] | None") -> "SamplingParams":
        """Return `value` as `SamplingParams`; a mapping holds its fields, None means the defaults."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            check_keywords("SamplingParams", value, [f.name for f in fields(cls)])
            return cls(**value)
        raise ArgumentTypeError(
            f"`sampling_params` is a {type(value).__name__}. Pass a `SamplingParams`, a dict of its fields, or None.")


@dataclass(frozen=True, kw_only=True)
class SampledSequence:
    """One completion.

    Attributes:
        tokens: the new tokens, the end token included.
        logprobs: of each token under the model's own distribution, before temperature, top-p, top-k and penalties.
        decoded: text of the tokens, without special tokens and without a matched stop string.
        stop_reason: "stop" (end token or stop string) or "length".
        new_input_feature: prompt and completion as a feature; the completion is labelled and `old_logprobs` are set.
        top_logprobs: at each position a dict token -> log-probability of the likeliest alternatives, when asked for.
    """

    tokens: list[int]
    logprobs: list[float]
    decoded: str
    stop_reason: StopReason
    new_input_feature: InputFeature
    top_logprobs: list[dict[int, float]] | None = None


@dataclass(frozen=True, kw_only=True)
class SampleResponse:
    """The completions of one prompt. `prompt_logprobs[0]` is None: nothing precedes the first token."""

    sequences: list[SampledSequence] = field(default_factory=lambda: list[SampledSequence]())
    prompt_logprobs: list[float | None] | None = None


def flatten_responses(inputs: Sequence[Any]) -> list[Any]:
    """Return one feature a sequence, in order, where `inputs` holds `SampleResponse`s; other items stay as they are."""
    flat: list[Any] = []
    for item in inputs:
        if isinstance(item, SampleResponse):
            flat.extend(sequence.new_input_feature for sequence in item.sequences)
        else:
            flat.append(item)
    return flat


def extend_feature(feature: InputFeature, tokens: Sequence[int], *, logprobs: Sequence[float] | None = None) -> InputFeature:
    """Return a new feature: `feature`, most often a prompt, with `tokens` behind it, which are supervised.

    Args:
        feature: not mutated.
        tokens: what the model answered.
        logprobs: of each of `tokens`; they become `old_logprobs`, 0.0 for tokens before them. Needed if `feature` has some.
    """
    ids, new = feature["input_ids"], list(tokens)
    joined = cast(InputFeature, dict(feature))
    joined["input_ids"] = [*ids, *new]
    joined["labels"] = [*feature.get("labels", [IGNORE_INDEX] * len(ids)), *new]
    if logprobs is None and "old_logprobs" in feature:
        raise DataError("The feature has `old_logprobs`. Pass `logprobs=` of the tokens to append as well.")
    if logprobs is not None:
        if len(logprobs) != len(new):
            raise DataError(f"`logprobs` has {len(logprobs)} entries for {len(new)} tokens. Pass one a token.")
        joined["old_logprobs"] = [*feature.get("old_logprobs", [0.0] * len(ids)), *logprobs]
    return joined


def check_feature(feature: object, *, where: str) -> InputFeature:
    """Return `feature` after checking its keys and lengths. `where` names the place in an error, e.g. "inputs[3]"."""
    if not isinstance(feature, Mapping):
        raise DataError(
            f"{where} is a {type(feature).__name__}, not a feature. Pass dicts with `input_ids` and `labels`, as "
            "`Dataset.encode()` or `Template.encode()` make them.")
    given = cast("Mapping[str, Any]", feature)
    for key in given:
        if key not in FEATURE_KEYS:
            raise DataError(
                f"{where} has the unknown key `{key}`.{did_you_mean(key, FEATURE_KEYS)} A feature has: {listing(FEATURE_KEYS)}.")
    for key in ("input_ids", "labels", "old_logprobs"):
        if key in given and (isinstance(given[key], str | bytes | Mapping) or not hasattr(given[key], "__len__")):
            raise DataError(f"{where}: `{key}` is {given[key]!r} of type {type(given[key]).__name__}. Use a list with one number a "
                            "token.")
    if "input_ids" not in given or len(given["input_ids"]) == 0:
        raise DataError(f"{where} has no `input_ids`. A feature holds at least one token.")
    length = len(given["input_ids"])
    for key in ("labels", "old_logprobs"):
        if key in given and len(given[key]) != length:
            raise DataError(f"{where} has {length} `input_ids` but {len(given[key])} `{key}`. Both must have one entry a token.")
    return cast(InputFeature, given)
