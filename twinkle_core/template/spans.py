"""What is supervised, as places in the outline of a shape.

Of an assistant turn: from the first character after the text that the generation prompt would have put there, to the end of its
end-of-turn marker; nothing after it and no empty think block. Where the template has `{% generation %}`, the part of that
which lies inside. The places are found by comparing the template's own text around a turn with what stands there when the
conversation ends before the turn (with the generation prompt) or after it; a row's texts are never searched.
"""

import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from twinkle_core.errors import TemplateError
from twinkle_core.template.render import Renderer, Tools, refusals
from twinkle_core.template.shape import Grain, Messages
from twinkle_core.template.skeleton import Outline, Sample, outline, render_sample

_UNIT = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]|\w+|\s|.", re.DOTALL)
_MARKER = re.compile(r"\s*(<[^<>\s]*>|\[[^\[\]\s]*\])")
_EMPTY_THOUGHT = re.compile(r"\s*<(think|thinking)>\s*</\1>\s*")
_MUST_SHOW = ("content", "tool_calls")


@dataclass(frozen=True, slots=True)
class Span:
    """Supervised text: from `start` behind the beginning of piece `first` to `end` behind the beginning of piece `last`."""

    first: int
    start: int
    last: int
    end: int


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The outline of a shape, its supervised stretches in order, and (turn, key) of what the template does not print."""

    outline: Outline
    spans: list[Span]
    hidden: list[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class Tail:
    """The template's text behind the last words of a conversation.

    Attributes:
        text: up to the end.
        index: of those words, counted from the first words of the last message.
        count: how often they were printed before.
    """

    text: str
    index: int
    count: int


def common_units(left: str, right: str) -> int:
    """Return how many characters `left` and `right` share from the start, never cutting a marker or a word in two."""
    at = 0
    for unit in _UNIT.finditer(left):
        other = _UNIT.match(right, at)
        if other is None or other[0] != unit[0]:
            break
        at = unit.end()
    return at


def common_units_at_end(left: str, right: str) -> int:
    """Return how many characters `left` and `right` share up to their ends, in whole markers and words."""
    size = 0
    for one, other in zip(reversed(_UNIT.findall(left)), reversed(_UNIT.findall(right)), strict=False):
        if one != other:
            break
        size += len(one)
    return size


class SpanFinder:
    """Builds skeletons for one template. What stands around a turn is remembered, so a shape costs a few renderings."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._tails: dict[Any, Tail] = {}
        self._exchange: tuple[str, str] | None = None

    def skeleton(self, messages: Messages, parts: tuple[Any, ...], tools: Tools, grain: Grain, *, is_prompt: bool) -> Skeleton:
        """Return the skeleton of the shape of `messages`.

        Args:
            messages: a conversation of that shape.
            parts: what `decompose` gives for it.
            tools: its tools.
            grain: how it was taken apart.
            is_prompt: whether it is rendered with the generation prompt; then nothing is supervised.

        Raises: what the template raises; `TemplateError` with the turn if its place cannot be told.
        """
        found, sample = outline(
            messages, grain, lambda shown: self._renderer.render(shown, tools, add_generation_prompt=is_prompt))
        hidden = _hidden(sample)
        if is_prompt or hidden:
            return Skeleton(found, [], hidden)
        shape = _Turns(self, messages, parts, tools, grain, sample)
        spans = [span for turn, message in enumerate(messages) if message["role"] == "assistant" for span in shape.spans(turn)]
        return Skeleton(found, self._inside_generation(sample, tools, spans), [])

    def sample(self, messages: Messages, tools: Tools, grain: Grain, *, is_prompt: bool) -> Sample | None:
        """Return the rendering of placeholders, or None if the template refuses the conversation."""
        try:
            return render_sample(
                messages, grain, lambda shown: self._renderer.render(shown, tools, add_generation_prompt=is_prompt))
        except refusals():  # templates refuse beginnings of conversations by raising
            return None

    def remembered(self, key: Any) -> "Tail | None":
        """Return what `remember` stored."""
        return self._tails.get(key)

    def remember(self, key: Any, tail: "Tail") -> None:
        """Store the template's text behind a turn under what it depends on."""
        self._tails[key] = tail

    def exchange(self) -> tuple[str, str]:
        """Return (generation prompt, end of an answer) of one question and one answer."""
        if self._exchange is None:
            question = {"role": "user", "content": "question"}
            turns: Messages = [question, {"role": "assistant", "content": "answer"}]
            asked = self.sample([question], None, Grain(), is_prompt=False)
            prompt = self.sample([question], None, Grain(), is_prompt=True)
            answered = self.sample(turns, None, Grain(), is_prompt=False)
            continued = self.sample([*turns, question], None, Grain(), is_prompt=False)
            opening = prompt.pieces[-1] if prompt else ""
            opening = opening[common_units(asked.pieces[-1], opening) if asked else 0:]
            end = answered.pieces[-1] if answered else ""
            last = continued.position(1, 0) if continued else None
            if continued and last is not None:
                end = end[:common_units(end, continued.pieces[last + 1])].rstrip() or end
            self._exchange = opening, end.rstrip()
        return self._exchange

    def _inside_generation(self, sample: Sample, tools: Tools, spans: list[Span]) -> list[Span]:
        """Return the parts of `spans` that lie inside `{% generation %}` blocks."""
        ranges = self._renderer.generation_ranges(sample.messages, tools)
        if ranges is None:
            return spans
        lengths = [len(sample.pieces[0])]
        for index, piece in zip(sample.order, sample.pieces[1:], strict=True):
            lengths += [len(sample.words[index]), len(piece)]
        ends = list(accumulate(lengths))
        starts = [0, *ends[1::2]]
        inside: list[Span] = []
        for span in spans:
            start, end = starts[span.first] + span.start, starts[span.last] + span.end
            for opened, closed in ranges:
                low, high = max(start, opened), min(end, closed)
                if low < high:
                    inside.append(Span(*_place(low, starts, sample.pieces), *_place(high, starts, sample.pieces)))
        return inside


def _place(at: int, starts: list[int], pieces: list[str]) -> tuple[int, int]:
    """Return (piece, offset in it) of a character of a sample; the beginning of words is the end of the piece before."""
    piece = bisect_right(starts, at) - 1
    offset = at - starts[piece]
    if offset > len(pieces[piece]):
        raise TemplateError("a `{% generation %}` block of the template begins or ends inside a message's text, so its labels "
                            "cannot be found. Pass a `chat_template` whose blocks hold whole texts.")
    return piece, offset


def _hidden(sample: Sample) -> list[tuple[int, str]]:
    """Return (turn, key) of contents and tool calls of which the template prints nothing."""
    printed = {(sample.slots[index].turn, sample.slots[index].key) for index in sample.order}
    places = dict.fromkeys((slot.turn, slot.key) for slot in sample.slots if slot.key in _MUST_SHOW)
    return [place for place in places if place not in printed]


@dataclass(frozen=True)
class _Turns:
    """One shape while its spans are sought."""

    finder: SpanFinder
    messages: Messages
    parts: tuple[Any, ...]
    tools: Tools
    grain: Grain
    sample: Sample

    def spans(self, turn: int) -> list[Span]:
        """Return the supervised stretches of an assistant turn: one, but for templates that print other turns inside it."""
        first, start = self._start(turn)
        last, end = self._end(turn, first, start)
        if any(self.sample.slots[index].turn > turn for index in self.sample.order[first:last]):
            return self._around_others(turn, Span(first, start, last, end))
        return [Span(first, start, last, max(end, start) if first == last else end)]

    def _around_others(self, turn: int, whole: Span) -> list[Span]:
        """Return the parts of `whole` that are the turn's own: what is also there when the conversation ends with it."""
        alone = self.finder.sample(self.messages[:turn + 1], self.tools, self.grain, is_prompt=False)
        if alone is None:
            raise self._lost(turn, "ends")
        spans: list[Span] = []
        first, start = whole.first, whole.start
        before: int | None = None
        for at, index in enumerate(alone.order):
            position = self.sample.position(index, alone.order[:at].count(index))
            if position is None or position < whole.first:
                continue
            if before is not None and position != before + 1:
                between, behind, ahead = alone.pieces[at], self.sample.pieces[before + 1], self.sample.pieces[position]
                spans.append(Span(first, start, before + 1, common_units(between, behind)))
                first, start = position, len(ahead) - common_units_at_end(between, ahead)
            before = position
        return [*spans, Span(first, start, whole.last, whole.end)]

    def _key(self, kind: str, turn: int) -> Any:
        before = self.messages[turn - 1]["role"] if turn else None
        return kind, self.parts[turn], before, self.tools is not None, self.grain

    def _first_slot(self, turn: int) -> int:
        """Return the index of the first words that a turn, or one after it, brings."""
        return next((at for at, slot in enumerate(self.sample.slots) if slot.turn >= turn), len(self.sample.slots))

    def _tail(self, count: int, *, is_prompt: bool) -> tuple[str, int] | None:
        """Return the text behind the last words of the first `count` messages, and their position in the whole.

        The position is -1 if they have no words. None if the template refuses them alone, or prints them otherwise in the whole.
        """
        if not count:
            return None
        key = self._key("prompt" if is_prompt else "end", count - 1)
        base = self._first_slot(count - 1)
        tail = self.finder.remembered(key)
        if tail is None:
            sample = self.finder.sample(self.messages[:count], self.tools, self.grain, is_prompt=is_prompt)
            if sample is None:
                return None
            last = sample.last()
            if last is None:
                return sample.pieces[-1], -1
            tail = Tail(sample.pieces[-1], last[0] - base, last[1])
            if last[0] >= base:
                self.finder.remember(key, tail)
        position = self.sample.position(base + tail.index, tail.count)
        return None if position is None else (tail.text, position)

    def _start(self, turn: int) -> tuple[int, int]:
        """Return the place behind what the generation prompt would have put, and behind an empty think block."""
        tail = self._tail(turn, is_prompt=True)
        own = self.sample.first_of(turn)
        piece, offset = None, 0
        if tail is not None:
            text, position = tail
            if own is None or own == position + 1:
                piece = position + 1
                offset = common_units(text, self.sample.pieces[piece])
        if piece is None:
            if own is None:
                raise self._lost(turn, "begins")
            piece, offset = own, self._after_header(own, turn)
        gap = self.sample.pieces[piece]
        offset += self._header(gap[offset:])
        for block in _EMPTY_THOUGHT.finditer(gap):
            if block.start() <= offset < block.end():
                offset = block.end()
        return piece, offset

    def _header(self, rest: str) -> int:
        """Return the length of a role header, which some templates print where their generation prompt has none."""
        opening, _ = self.finder.exchange()
        shared = common_units(opening, rest)
        return shared if any(character.isalpha() for character in _MARKER.sub("", opening[:shared])) else 0

    def _after_header(self, piece: int, turn: int) -> int:
        """Return the offset behind the last header in a piece, where the conversation up to the turn cannot be rendered alone."""
        opening, _ = self.finder.exchange()
        gap = self.sample.pieces[piece]
        head = _UNIT.match(opening.lstrip())
        opening = opening.lstrip()
        best = (0, 0)
        at = gap.find(head[0]) if head else -1
        while head and at >= 0:
            best = max(best, (common_units(opening, gap[at:]), at))
            at = gap.find(head[0], at + 1)
        if not best[0]:
            raise self._lost(turn, "begins")
        return sum(best)

    def _end(self, turn: int, first: int, start: int) -> tuple[int, int]:
        """Return the place behind the end-of-turn marker of a turn."""
        tail = self._tail(turn + 1, is_prompt=False)
        if tail is None or tail[1] < first:  # refused alone, or without words: the end is looked for in the template's own text
            last = self._last_in_a_row(turn, first)
            return last, self._canonical_end(turn, self.sample.pieces[last], start if last == first else 0)
        text, position = tail
        gap = self.sample.pieces[position + 1]
        if turn == len(self.messages) - 1:
            follow = self._follow(turn)
            return position + 1, len(gap[:common_units(gap, follow)].rstrip() or gap.rstrip())
        shared = gap[:common_units(text, gap)].rstrip()
        return position + 1, len(shared) or self._other_marker(text, gap, self.messages[turn + 1]["role"])

    def _last_in_a_row(self, turn: int, piece: int) -> int:
        """Return the piece behind the words of a turn that begin behind `piece`; `piece` if there are none."""
        while piece < len(self.sample.order) and self.sample.slots[self.sample.order[piece]].turn == turn:
            piece += 1
        return piece

    def _canonical_end(self, turn: int, gap: str, start: int) -> int:
        """Return the end of a turn in the template's own text behind its words: the marker that ends any answer."""
        _, end = self.finder.exchange()
        at = gap.find(end, start)
        if at >= 0:
            return at + len(end)
        at = start + len(gap[start:]) - len(gap[start:].lstrip())
        is_last = turn == len(self.messages) - 1
        marker = 0 if is_last else self._other_marker(end, gap[at:], self.messages[turn + 1]["role"])
        if not marker:
            raise self._lost(turn, "ends")
        return at + marker

    def _follow(self, turn: int) -> str:
        """Return the text behind the last words of the last turn when the conversation goes on, or "" if it cannot."""
        key = self._key("follow", turn)
        known = self.finder.remembered(key)
        if known is not None:
            return known.text
        last = self.sample.last()
        roles = ("tool", "user") if "tool_calls" in self.messages[turn] else ("user",)
        follow = ""
        for role in roles if last else ():
            longer = [*self.messages, {"role": role, "content": "more"}]
            sample = self.finder.sample(longer, self.tools, self.grain, is_prompt=False)
            position = sample.position(*last) if sample and last else None
            if sample and position is not None:
                follow = sample.pieces[position + 1]
                break
        self.finder.remember(key, Tail(follow, 0, 0))
        return follow

    def _other_marker(self, tail: str, gap: str, next_role: str) -> int:
        """Return the end of a marker that ends a turn in the middle only, where the last turn has another; else 0."""
        opening, _ = self.finder.exchange()
        head = _UNIT.match(opening.lstrip())
        marker = _MARKER.match(gap)
        is_end = marker and _MARKER.match(tail) and not (head and marker[1] == head[0]) and next_role not in marker[1].lower()
        return marker.end() if marker and is_end else 0

    def _lost(self, turn: int, does: str) -> TemplateError:
        return TemplateError(f"it cannot be told where the assistant's turn {does} in what the template prints. Pass a "
                             "`chat_template` that marks it with {% generation %}, or that keeps turns in order.", turn=turn)
