"""The shape of a conversation: everything about it but its words.

Two conversations of one shape take the same path through a chat template, so one rendering with placeholders tells where the
words of both go. `decompose` takes a conversation apart into shape and words; `substitute` puts other words in. What counts
as words is a `Grain`: texts and numbers, and where that is too coarse (a template looks for markers inside texts) only the
text between the markers.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Grain:
    """How finely texts are taken apart.

    Attributes:
        markers: strings that belong to the shape where they occur in a text, or None.
        calls_are_words: whether tool calls and extra keys are taken apart; if not, they belong to the shape as they are.
    """

    markers: re.Pattern[str] | None = None
    calls_are_words: bool = True


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for words.

    Attributes:
        turn: the message it belongs to.
        key: the message's key that it is under.
        is_number: whether a number goes there.
        is_id: whether it names a call; templates look for the same id elsewhere.
    """

    turn: int
    key: str
    is_number: bool = False
    is_id: bool = False


_Leaf = Callable[[Any, str, bool], Any]


def decompose(messages: Messages, grain: Grain) -> tuple[tuple[Any, ...], list[str]]:
    """Return the shape of `messages` as one hashable part a message, and their words in the order of `substitute`.

    An id that comes again is no new words: which ids are the same is part of the shape.
    """
    words: list[str] = []
    parts: list[Any] = []
    ids: dict[str, int] = {}

    def take(value: Any, key: str, is_id: bool) -> str:
        if is_id and value in ids:
            return f"\0{ids[value]}"
        if is_id:
            ids[value] = len(ids)
        words.append(value if isinstance(value, str) else json.dumps(value))
        return "\0s" if isinstance(value, str) else "\0n"

    for message in messages:
        content = message["content"]
        if len(message) == 2 and grain.markers is None and content and not content.isspace():
            parts.append(message["role"])
            words.append(content)
        else:
            parts.append(repr(_map_message(message, grain, take)))
    return tuple(parts), words


def substitute(messages: Messages, grain: Grain, word: Callable[[Slot, Any], str | int | float]) -> Messages:
    """Return `messages` with `word(slot, value)` in each place for words, in the order of `decompose`."""
    def replace(turn: int) -> _Leaf:
        return lambda value, key, is_id: word(Slot(turn, key, not isinstance(value, str), is_id), value)

    return [_map_message(message, grain, replace(turn)) for turn, message in enumerate(messages)]


def _map_message(message: dict[str, Any], grain: Grain, leaf: _Leaf) -> dict[str, Any]:
    mapped: dict[str, Any] = {}
    for key, value in message.items():
        is_text = key in ("content", "reasoning_content")
        if key == "role" or not (is_text or grain.calls_are_words):
            mapped[key] = value
        else:
            mapped[key] = _map_value(value, key, key, grain.markers, leaf)
    return mapped


def _map_value(value: Any, key: str, name: str, markers: re.Pattern[str] | None, leaf: _Leaf) -> Any:
    """Return `value` with words replaced: `key` is the message's key it is under, `name` the innermost."""
    if isinstance(value, str):
        if name in ("id", "tool_call_id"):
            return leaf(value, key, True) if value else value
        return _map_text(value, key, markers, leaf)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return leaf(value, key, False)
    if isinstance(value, dict):
        return {inner: item if inner == "type" else _map_value(item, key, inner, markers, leaf)
                for inner, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_map_value(item, key, "", markers, leaf) for item in cast("list[Any]", value)]
    return value


def _map_text(text: str, key: str, markers: re.Pattern[str] | None, leaf: _Leaf) -> str:
    """Blank text and markers decide what templates do, so they belong to the shape."""
    if not text or text.isspace():
        return text
    if markers is None:
        return leaf(text, key, False)
    pieces = markers.split(text)  # the pattern has one group, so markers stand at odd positions
    return "".join(piece if at % 2 or not piece or piece.isspace() else leaf(piece, key, False)
                   for at, piece in enumerate(pieces))
