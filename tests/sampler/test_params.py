"""`SamplingParams` refuses what it cannot mean, whatever its type."""

from typing import Any

import numpy as np
import pytest

from twinkle_core.data_format import SamplingParams
from twinkle_core.errors import ArgumentError, ArgumentTypeError, UnknownArgumentError


@pytest.mark.parametrize(("field", "value", "allowed"), [
    ("max_tokens", -1, "an integer >= 0"), ("max_tokens", "5", "an integer >= 0"), ("max_tokens", 1.5, "an integer >= 0"),
    ("max_tokens", None, "an integer >= 0"), ("max_tokens", True, "an integer >= 0"),
    ("temperature", -0.1, r"a number >= 0 \(0 is greedy\)"), ("temperature", "0.7", "a number"),
    ("temperature", float("nan"), "a number"), ("temperature", float("inf"), "a number"),
    ("top_p", 0, r"a number in \(0, 1\]"), ("top_p", 1.1, r"a number in \(0, 1\]"), ("top_p", None, r"a number in"),
    ("top_k", -2, "an integer >= 1, or -1"), ("top_k", "all", "an integer >= 1, or -1"),
    ("seed", "x", "an integer, or None"), ("seed", 1.0, "an integer, or None"),
    ("num_samples", 0, "an integer from 1 to 65536"), ("num_samples", [2], "an integer from 1 to"),
    ("logprobs", -1, "an integer >= 0"), ("logprobs", "2", "an integer >= 0"),
    ("prompt_logprobs", 3, "True or False"),
    ("repetition_penalty", 0, "a number > 0"), ("repetition_penalty", "1", "a number > 0"),
    ("stop", ["a", ""], "non-empty strings"), ("stop", [1], "non-empty strings"), ("stop", 5, "non-empty strings"),
])
def test_a_value_that_is_not_allowed_is_an_error_with_the_value_and_what_is(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ArgumentError, match=rf"`SamplingParams\({field}=.*\)`: use {allowed}"):
        SamplingParams.of({field: value})


def test_common_spellings_of_nothing_and_of_one_are_taken() -> None:
    params = SamplingParams(stop="END", top_k=0, logprobs=True)
    assert (params.stop, params.top_k, params.logprobs) == (("END",), -1, 1)
    assert SamplingParams.of({"stop": None, "top_k": None, "logprobs": None}) == SamplingParams()
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    params: Any = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5))  # type: ignore[arg-type]
    assert (params.max_tokens, params.temperature) == (3, 0.5)


def test_a_misspelt_field_has_near_matches_and_another_type_is_refused() -> None:
    with pytest.raises(UnknownArgumentError, match="Did you mean `max_tokens`"):
        SamplingParams.of({"max_token": 3})
    with pytest.raises(ArgumentTypeError, match="is a int. Pass a `SamplingParams`, a dict"):
        SamplingParams.of(3)  # type: ignore[arg-type]
