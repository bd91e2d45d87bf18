"""Preprocessors for datasets that many use: self-cognition, Alpaca and GSM8K; and any function as a preprocessor.

They turn a row into a conversation. How it becomes tokens is the template's business.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from twinkle_core.data_format import Trajectory
from twinkle_core.errors import ArgumentTypeError, DataError, listing
from twinkle_core.preprocessor.interface import Preprocessor

LANGUAGES = ("zh", "en")


class SelfCognitionProcessor(Preprocessor):
    """Puts a name and an author into rows that say who the model is.

    A row has `query`, `response` with `{{NAME}}` and `{{AUTHOR}}`, and `tag`, its language ("zh" or "en").
    """

    def __init__(self, model_name: str | tuple[str, str], model_author: str | tuple[str, str]) -> None:
        """Each argument is one text for all rows, or a pair (zh, en) of texts."""
        self.model_name = _by_language("model_name", model_name)
        self.model_author = _by_language("model_author", model_author)

    def __call__(self, row: Mapping[str, Any]) -> Trajectory:
        """Return query and response, both with the names filled in."""
        tag = row.get("tag") or "en"
        if tag not in LANGUAGES:
            raise DataError(f"the column `tag` holds {tag!r}. Known languages: {listing(LANGUAGES)}.")
        query, response = (
            _text(row, column).replace("{{NAME}}", self.model_name[tag]).replace("{{AUTHOR}}", self.model_author[tag])
            for column in ("query", "response"))
        return _chat(query, response)


class AlpacaProcessor(Preprocessor):
    """Rows with `instruction`, `output` and, where there is one, `input`. Source: Taori et al. 2023, Stanford Alpaca."""

    def __call__(self, row: Mapping[str, Any]) -> Trajectory:
        """Return instruction and input as the user's turn, output as the assistant's."""
        extra = _text(row, "input") if row.get("input") is not None else ""
        return _chat(instruction_text(_text(row, "instruction"), extra), _text(row, "output"))


class GSM8KProcessor(Preprocessor):
    """Rows with `question` and `answer`, whose last line is "#### " and the number. Source: Cobbe et al. 2021.

    The number goes to `user_data["ground_truth"]`, as text without thousands separators, for a reward to compare with.
    """

    MARK = "####"

    def __init__(self, system: str | None = None) -> None:
        """`system`: a system message for every row, e.g. how the answer is to be written."""
        self.system = system

    def __call__(self, row: Mapping[str, Any]) -> Trajectory:
        """Return question and answer, with the final number in `user_data`."""
        answer = _text(row, "answer")
        _, mark, number = answer.rpartition(self.MARK)
        if not mark or not number.strip():
            raise DataError(f"the column `answer` has no final number after `{self.MARK}`: {answer[-60:]!r}.")
        trajectory = _chat(_text(row, "question"), answer)
        if self.system is not None:
            trajectory["messages"].insert(0, {"role": "system", "content": self.system})
        trajectory["user_data"] = {"ground_truth": number.strip().replace(",", "")}
        return trajectory


class FunctionPreprocessor(Preprocessor):
    """A function of a row. It may return a conversation, or a row of any layout that `encode()` recognises."""

    def __init__(self, function: Callable[[dict[str, Any]], Any]) -> None:
        self.function = function
        self.name: str = getattr(function, "__name__", type(function).__name__)

    def __call__(self, row: Mapping[str, Any]) -> Trajectory:
        """Return what the function makes of the row. It gets a dict of its own, so it may change it."""
        result = self.function(dict(row))
        if not isinstance(result, Mapping):
            raise DataError(f"`{self.name}` returned {result!r} of type {type(result).__name__}. Return a dict with `messages`, or "
                            "a row of another layout; to leave rows out, use `dataset.filter`.")
        return cast(Trajectory, dict(result))


def instruction_text(instruction: str, extra: str) -> str:
    """Return the user's turn of an instruction row: the input, if there is one, on the line after the instruction."""
    return f"{instruction}\n{extra}" if extra else instruction


def _chat(query: str, response: str) -> Trajectory:
    return {"messages": [{"role": "user", "content": query}, {"role": "assistant", "content": response}]}


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        what = f"holds a {type(value).__name__}" if value is not None else "is missing or empty"
        raise DataError(f"the column `{column}` {what}. It must be text. The row has: {listing(map(str, row))}.")
    return value


def _by_language(argument: str, value: object) -> dict[str, str]:
    if isinstance(value, str):
        return dict.fromkeys(LANGUAGES, value)
    if isinstance(value, tuple | list) and len(value) == len(LANGUAGES) and all(isinstance(text, str) for text in value):
        return dict(zip(LANGUAGES, cast("list[str]", value), strict=True))
    raise ArgumentTypeError(f"`{argument}={value!r}`: use a text, or a pair (zh, en) of texts.")
