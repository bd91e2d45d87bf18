"""Rewards of answers to grade-school problems (GSM8K, Cobbe et al. 2021), whose last line is "#### " and the number.

`GSM8KProcessor` puts the reference answer where `GSM8KAccuracyReward` looks for it.
"""

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from twinkle_core.errors import DataError, checks_keywords, listing
from twinkle_core.reward.interface import TextReward

MARK = "####"
_NUMBER = re.compile(r"(-?)\s*\$?\s*(\d[\d,]*(?:\.\d+)?|\.\d+)")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_LAST_LINE = re.compile(rf"(?:^|\n)[ \t]*{MARK}[ \t]*-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)[ \t]*\.?\s*\Z")


class GSM8KAccuracyReward(TextReward):
    """1.0 where the final number of a completion equals the reference answer, else 0.0.

    The final number stands after the last "####"; without one in the last `\\boxed{}`; without that it is the last number of the
    text. So it is about the answer, not about the format. Thousands separators and a dollar sign do not matter.

    Args:
        key: where in `user_data` the reference answer is.
    """

    @checks_keywords
    def __init__(self, key: str = "ground_truth") -> None:
        self.key = key

    def score(self, completion: str, user_data: Mapping[str, Any]) -> float:
        """Return the reward of one completion."""
        return float(final_number(completion) == reference_number(user_data, self.key))


class GSM8KFormatReward(TextReward):
    """1.0 where a completion ends with a line of "#### " and a number, else 0.0."""

    def score(self, completion: str, user_data: Mapping[str, Any]) -> float:
        """Return the reward of one completion."""
        return float(_LAST_LINE.search(completion) is not None)


def final_number(text: str) -> Decimal | None:
    """Return the number that a solution ends with, or None."""
    _, mark, after = text.rpartition(MARK)
    if mark:
        return _first(after.strip().partition("\n")[0])
    boxed = _BOXED.findall(text)
    if boxed:
        return _first(boxed[-1])
    numbers = list(_NUMBER.finditer(text))
    return _value(numbers[-1]) if numbers else None


def reference_number(user_data: Mapping[str, Any], key: str) -> Decimal:
    """Return the reference answer in `user_data`."""
    value = reference(user_data, key)
    try:
        return Decimal(str(value).replace(",", "").replace("$", "").strip())
    except InvalidOperation as error:
        raise DataError(f"`user_data[{key!r}]` is {value!r}, which is no number. Use `MathReward` for other answers.") from error


def reference(user_data: Mapping[str, Any], key: str) -> Any:
    """Return `user_data[key]`. Raises: `DataError` that says how to bring it there."""
    if key not in user_data:
        raise DataError(f"The reward looks for the reference answer in `user_data[{key!r}]`, and the row has {listing(user_data)}. "
                        "Map the dataset by a preprocessor that sets it, as `GSM8KProcessor` does, or pass `user_data=`.")
    return user_data[key]


def _first(text: str) -> Decimal | None:
    found = _NUMBER.search(text)
    return None if found is None else _value(found)


def _value(found: re.Match[str]) -> Decimal:
    return Decimal(found[1] + found[2].replace(",", ""))
