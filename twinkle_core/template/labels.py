"""Which characters of a row's rendering are supervised.

Holds the row's rendering against the skeleton of its shape, in three grains: whole texts; then texts around the strings that the
template itself names; then those with tool calls as part of the shape. The first that gives the rendering exactly is the right
one. Skeletons are kept, so a row of a known shape costs one join and one comparison.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from twinkle_core.errors import TemplateError
from twinkle_core.template.render import Renderer, Tools, refusals
from twinkle_core.template.shape import Grain, Messages, decompose
from twinkle_core.template.spans import Skeleton, SpanFinder

_KEPT_SHAPES = 4096

Ranges = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A cleaned row. `tools_key` says whether two rows have the same tools."""

    messages: Messages
    tools: Tools
    tools_key: str
    row: int | None


class Labeller:
    """Finds supervised characters for one template. `name` is how errors call it."""

    def __init__(self, renderer: Renderer, name: str) -> None:
        self._renderer = renderer
        self._name = name
        self._finder = SpanFinder(renderer)
        self._skeletons: dict[Any, Skeleton | TemplateError] = {}

    @cached_property
    def _grains(self) -> tuple[Grain, ...]:
        markers = self._renderer.markers
        return Grain(), Grain(markers=markers), Grain(markers=markers, calls_are_words=False)

    @property
    def end_of_turn(self) -> str:
        """The text that ends an assistant's answer."""
        return self._finder.exchange()[1]

    @property
    def generation_prompt(self) -> str:
        """The text that makes the model answer a question."""
        return self._finder.exchange()[0]

    def ranges(self, conversation: Conversation, text: str) -> Ranges:
        """Return the supervised character ranges of `text`, the rendering of `conversation`, in order.

        Raises: `TemplateError` if the rendering does not fit the shape, or the template does not print what a message says.
        """
        found = self._fit(conversation, text)
        if found is None:
            self._skeletons.clear()  # a template may print the date, which changes
            found = self._fit(conversation, text)
        if found is None:
            raise self._misfit(conversation, text)
        return found

    def check_prompt(self, conversation: Conversation) -> None:
        """Raise `TemplateError` if the template does not print what a message of a prompt says."""
        problem: TemplateError | None = None
        for grain in self._grains:
            _, skeleton = self._skeleton(conversation, grain, is_prompt=True)
            if isinstance(skeleton, TemplateError):
                return
            problem = self._hidden(conversation, skeleton)
            if problem is None:
                return
        if problem is not None:
            raise problem

    def _fit(self, conversation: Conversation, text: str) -> Ranges | None:
        problem: TemplateError | None = None
        for grain in self._grains:
            words, skeleton = self._skeleton(conversation, grain, is_prompt=False)
            if isinstance(skeleton, TemplateError):
                problem = problem or TemplateError(
                    f"{skeleton.args[0]} Template: {self._name}.", row=conversation.row, turn=skeleton.turn)
                continue
            filled, starts = skeleton.outline.fill(words)
            if filled != text:
                continue
            hidden = self._hidden(conversation, skeleton)
            if hidden is not None:
                raise hidden
            return [(starts[span.first] + span.start, starts[span.last] + span.end) for span in skeleton.spans]
        if problem is not None:
            raise problem
        return None

    def _skeleton(
        self, conversation: Conversation, grain: Grain, *, is_prompt: bool,
    ) -> tuple[list[str], Skeleton | TemplateError]:
        parts, words = decompose(conversation.messages, grain)
        key = parts, conversation.tools_key, grain, is_prompt
        skeleton = self._skeletons.get(key)
        if skeleton is None:
            if len(self._skeletons) >= _KEPT_SHAPES:
                self._skeletons.clear()
            skeleton = self._build(conversation, parts, grain, is_prompt)
            self._skeletons[key] = skeleton
        return words, skeleton

    def _build(
        self, conversation: Conversation, parts: tuple[Any, ...], grain: Grain, is_prompt: bool,
    ) -> Skeleton | TemplateError:
        try:
            return self._finder.skeleton(conversation.messages, parts, conversation.tools, grain, is_prompt=is_prompt)
        except TemplateError as error:
            return error
        except refusals() as error:
            return TemplateError(f"the template cannot render this shape of conversation: {type(error).__name__}: {error}.")

    def _hidden(self, conversation: Conversation, skeleton: Skeleton) -> TemplateError | None:
        if not skeleton.hidden:
            return None
        turn, key = skeleton.hidden[0]
        role = conversation.messages[turn]["role"]
        return TemplateError(f"the template {self._name} prints nothing of the {role} message's `{key}`. Leave it out of "
                             "the row, or pass a `chat_template` that prints it.", row=conversation.row, turn=turn)

    def _misfit(self, conversation: Conversation, text: str) -> TemplateError:
        """Return the error for a rendering that is not its skeleton, with the turn where they part."""
        words, skeleton = self._skeleton(conversation, self._grains[-1], is_prompt=False)
        turn = None
        if isinstance(skeleton, Skeleton):
            filled, starts = skeleton.outline.fill(words)
            same = next((at for at, (left, right) in enumerate(zip(filled, text, strict=False)) if left != right), len(text))
            after = [position for position, start in enumerate(starts[1:]) if start <= same]
            position = min(len(after), len(skeleton.outline.order) - 1)
            turn = skeleton.outline.turns[position] if position >= 0 else None
        return TemplateError(f"the template {self._name} does not print this conversation's texts as they are, so its labels "
                             "cannot be found. Pass a `chat_template` that does, e.g. one with {% generation %} for this model.",
                             row=conversation.row, turn=turn)


def tools_key(tools: Tools) -> str:
    """Return a string that is the same for the same tools."""
    return "" if tools is None else json.dumps(tools, ensure_ascii=False, default=repr)
