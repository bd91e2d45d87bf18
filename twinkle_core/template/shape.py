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
    """A place for words: the message it belongs to, the key it is under, and whether numbers go there."""

    turn: int
    key: str
    is_number: bool = False


def decompose(messages: Messages, grain: Grain) -> tuple[tuple[Any, ...], list[str]]:
    """Return the shape of `messages` as one hashable part a message, and their words in the order of `substitute`."""
    words: list[str] = []
    parts: list[Any] = []
    collect = words.append
    markers = grain.markers
    for message in messages:
        content = message["content"]
        if len(message) == 2 and markers is None and content and not content.isspace():
            parts.append(message["role"])
            collect(content)
        else:
            parts.append(_part(message, grain, lambda value, key: _take(value, collect)))
    return tuple(parts), words


def _take(value: str | int | float, collect: Callable[[str], None]) -> str:
    collect(value if isinstance(value, str) else json.dumps(value))
    return "\0s" if isinstance(value, str) else "\0n"


def _part(message: dict[str, Any], grain: Grain, leaf: Callable[[Any, str], Any]) -> Any:
    mapped = _map_message(message, grain, leaf)
    return repr(mapped)


def substitute(messages: Messages, grain: Grain, word: Callable[[Slot], str | int | float]) -> Messages:
    """Return `messages` with `word(slot)` in each place for words, in the order of `decompose`."""
    def replace(turn: int) -> Callable[[Any, str], Any]:
        return lambda value, key: word(Slot(turn, key, not isinstance(value, str)))

    return [_map_message(message, grain, replace(turn)) for turn, message in enumerate(messages)]


def _map_message(message: dict[str, Any], grain: Grain, leaf: Callable[[Any, str], Any]) -> dict[str, Any]:
    mapped: dict[str, Any] = {}
    for key, value in message.items():
        is_text = key in ("content", "reasoning_content")
        if key == "role" or not (is_text or grain.calls_are_words):
            mapped[key] = value
        else:
            mapped[key] = _map_value(value, key, grain.markers, leaf)
    return mapped


def _map_value(value: Any, key: str, markers: re.Pattern[str] | None, leaf: Callable[[Any, str], Any]) -> Any:
    if isinstance(value, str):
        return _map_text(value, key, markers, leaf)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return leaf(value, key)
    if isinstance(value, dict):
        return {name: item if name == "type" else _map_value(item, key, markers, leaf)
                for name, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_map_value(item, key, markers, leaf) for item in cast("list[Any]", value)]
    return value


def _map_text(text: str, key: str, markers: re.Pattern[str] | None, leaf: Callable[[Any, str], Any]) -> str:
    """Blank text and markers decide what templates do, so they belong to the shape."""
    if not text or text.isspace():
        return text
    if markers is None:
        return leaf(text, key)
    pieces = markers.split(text)  # the pattern has one group, so markers stand at odd positions
    return "".join(piece if at % 2 or not piece or piece.isspace() else leaf(piece, key) for at, piece in enumerate(pieces))
