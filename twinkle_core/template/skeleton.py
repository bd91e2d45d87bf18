"""Where the words of a conversation go in its rendering, found once a shape.

The conversation is rendered with a unique placeholder in each place for words, and split at them. Putting a row's words
between the pieces must give the row's own rendering exactly; then the place of every word, and so of every turn, is known
without searching the row for headers, which its texts may hold.
"""

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from twinkle_core.template.render import refusals
from twinkle_core.template.shape import Grain, Messages, Slot, substitute

Render = Callable[[Messages], str]

_BEFORE, _AFTER = "\n \n", "\"é<\\\n \n"
"""Put around a placeholder, they show whether a template strips and whether it escapes."""


@dataclass(frozen=True, slots=True)
class Edit:
    """What a template does to words before it prints them.

    Attributes:
        left: characters stripped from the left: "" none, "\\n" line ends, None all blanks.
        right: the same on the right.
        escape: "" as they are; "json" escaped inside a JSON string; "ascii" that, in ASCII.
    """

    left: str | None
    right: str | None
    escape: str

    def __call__(self, words: str) -> str:
        """Return `words` as they are printed."""
        if self.left != "":
            words = words.lstrip(self.left)
        if self.right != "":
            words = words.rstrip(self.right)
        return json.dumps(words, ensure_ascii=self.escape == "ascii")[1:-1] if self.escape else words


_EDITS = [Edit(left, right, escape) for escape in ("", "json", "ascii") for left in ("", "\n", None) for right in ("", "\n", None)]


@dataclass(frozen=True, slots=True)
class Outline:
    """A rendering split at its placeholders.

    Attributes:
        pieces: the template's own text: before, between and behind the words; one more than `order`.
        order: index of the words that stand behind each piece but the last. Words may be missing or repeated.
        edits: how they are printed; None is as they are.
        turns: the message that the words behind each piece belong to.
    """

    pieces: list[str]
    order: list[int]
    edits: list[Edit | None]
    turns: list[int]

    def fill(self, words: list[str]) -> tuple[str, list[int]]:
        """Return the text with `words` in it, and where each piece begins."""
        parts, starts, at = [self.pieces[0]], [0], len(self.pieces[0])
        for index, edit, piece in zip(self.order, self.edits, self.pieces[1:], strict=True):
            word = words[index] if edit is None else edit(words[index])
            at += len(word)
            starts.append(at)
            at += len(piece)
            parts.append(word)
            parts.append(piece)
        return "".join(parts), starts


class _Placeholders:
    """Unique words, numbered, that can be given once more with blanks and characters to escape around them."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._stem = secrets.token_hex(4)
        self._base = 7_000_000_000_000 + secrets.randbelow(10**12)
        self._is_padded = False
        self.slots: list[Slot] = []
        self.given: list[str] = []

    def __call__(self, slot: Slot, value: str | int | float) -> str | int:
        if slot.is_id and value in self._ids:
            return self.given[self._ids[str(value)]]
        index = len(self.slots)
        if slot.is_id:
            self._ids[str(value)] = index
        self.slots.append(slot)
        if slot.is_number:
            self.given.append(str(self._base + 1000 * index))
            return self._base + 1000 * index
        word = f"Tw{self._stem}n{index}w"
        self.given.append(f"{_BEFORE}{word}{_AFTER}" if self._is_padded else word)
        return self.given[-1]

    def again(self) -> None:
        """Start over, with padding."""
        self.slots, self.given, self._ids, self._is_padded = [], [], {}, True


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation of placeholders, their words, and its rendering split at them (as in `Outline`)."""

    messages: Messages
    words: list[str]
    slots: list[Slot]
    pieces: list[str]
    order: list[int]

    def last(self) -> tuple[int, int] | None:
        """Return (index, n): the last words printed are the n-th printing of those words, from 0; None if there are none."""
        return (self.order[-1], self.order.count(self.order[-1]) - 1) if self.order else None

    def position(self, index: int, count: int) -> int | None:
        """Return the position in `order` of the n-th printing of words, from 0, or None."""
        found = [at for at, printed in enumerate(self.order) if printed == index]
        return found[count] if count < len(found) else None

    def first_of(self, turn: int) -> int | None:
        """Return the position in `order` of the first words of a turn, or None if none are printed."""
        return next((at for at, index in enumerate(self.order) if self.slots[index].turn == turn), None)


def render_sample(messages: Messages, grain: Grain, render: Render) -> Sample:
    """Render `messages` with placeholders for their words. Raises what the template raises."""
    return _sample(messages, grain, render, _Placeholders())


def _sample(messages: Messages, grain: Grain, render: Render, placeholders: _Placeholders) -> Sample:
    shown = substitute(messages, grain, placeholders)
    text, given = render(shown), placeholders.given
    index_of = {word: index for index, word in enumerate(given)}
    pieces, order, at = list[str](), list[int](), 0
    if given:
        for match in re.finditer("|".join(map(re.escape, given)), text):
            pieces.append(text[at:match.start()])
            order.append(index_of[match[0]])
            at = match.end()
    pieces.append(text[at:])
    return Sample(shown, given, placeholders.slots, pieces, order)


def outline(messages: Messages, grain: Grain, render: Render) -> tuple[Outline, Sample]:
    """Return the outline of all conversations that have the shape of `messages`, and the sample it was seen from.

    Raises what the template raises.
    """
    placeholders = _Placeholders()
    sample = _sample(messages, grain, render, placeholders)
    placeholders.again()
    edits = _edits(sample, partial(_padded, messages, grain, render, placeholders))
    turns = [sample.slots[index].turn for index in sample.order]
    return Outline(sample.pieces, sample.order, edits, turns), sample


def _padded(messages: Messages, grain: Grain, render: Render, placeholders: _Placeholders) -> tuple[str, list[str]] | None:
    try:
        return render(substitute(messages, grain, placeholders)), placeholders.given
    except refusals():  # a template may refuse texts that begin with a blank
        return None


def _edits(sample: Sample, padded: Callable[[], tuple[str, list[str]] | None]) -> list[Edit | None]:
    """Return how each word is printed, seen from a rendering with padded placeholders; as they are where that shows nothing."""
    pieces, order, slots = sample.pieces, sample.order, sample.slots
    unknown: list[Edit | None] = [None] * len(order)
    rendered = padded() if order else None
    if rendered is None:
        return unknown
    text, given = rendered
    edits: list[Edit | None] = []
    at = len(pieces[0])
    for index, piece in zip(order, pieces[1:], strict=True):
        if slots[index].is_number:
            edits.append(None)
            at += len(given[index]) + len(piece)
            continue
        edit = next((edit for edit in _EDITS if text.startswith(edit(given[index]) + piece, at)), None)
        if edit is None:
            return unknown
        edits.append(None if edit == _EDITS[0] else edit)
        at += len(edit(given[index])) + len(piece)
    return edits
