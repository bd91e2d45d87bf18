"""Rendering conversations with the tokenizer's own chat template, exactly as `apply_chat_template` does.

Knows transformers and jinja, and what a template does with `arguments`; nothing of labels.
"""

import functools
import json
import re
from functools import cached_property
from typing import Any

from twinkle_core.template.shape import Messages

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_STRING = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")
_VISIBLE = re.compile(r"[^\w\s]")
_PROBE = "twprobe"
_PROBE_CALL: Messages = [
    {"role": "user", "content": _PROBE},
    {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "id": "call00000", "function": {"name": _PROBE, "arguments": {_PROBE: _PROBE}}}]},
]

Tools = list[dict[str, Any]] | None


@functools.cache
def refusals() -> tuple[type[Exception], ...]:
    """Return what a template raises when it refuses a conversation: jinja's errors, and those of expressions on absent values.

    Anything else is a fault of the code around it and must not pass for a refusal.
    """
    import jinja2

    return jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError


class Renderer:
    """One chat template with the switches it is rendered with.

    Args:
        tokenizer: a Hugging Face tokenizer.
        chat_template: replaces the tokenizer's own.
        variables: what the template finds besides messages, tools and special tokens, e.g. `enable_thinking`.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None, variables: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._variables = variables

    def source(self, tools: Tools = None) -> str:
        """Return the text of the template that conversations with `tools` are rendered with."""
        return self._tokenizer.get_chat_template(self._chat_template, tools)

    def render(self, messages: Messages, tools: Tools = None, *, add_generation_prompt: bool = False) -> str:
        """Return the text of one conversation. Raises what the template raises."""
        return self.render_batch([messages], tools, add_generation_prompt=add_generation_prompt)[0]

    def render_batch(self, batch: list[Messages], tools: Tools, *, add_generation_prompt: bool) -> list[str]:
        """Return the texts of conversations that share `tools`. Raises what the template raises for one of them."""
        return self._tokenizer.apply_chat_template(
            [self._as_read(messages) for messages in batch], tools=tools, chat_template=self._chat_template, tokenize=False,
            add_generation_prompt=add_generation_prompt, **self._variables)

    def generation_ranges(self, messages: Messages, tools: Tools = None) -> list[tuple[int, int]] | None:
        """Return the character ranges inside `{% generation %}`, or None if the template has no such block."""
        source = self.source(tools)
        if not _GENERATION.search(source):
            return None
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = {**self._tokenizer.special_tokens_map, **self._variables}
        render: Any = render_jinja_template
        _, ranges = render(conversations=[self._as_read(messages)], tools=tools, chat_template=source,
                           return_assistant_tokens_mask=True, **variables)
        return ranges[0]

    @cached_property
    def knows_reasoning(self) -> bool:
        """Whether the template reads `reasoning_content`."""
        return "reasoning_content" in self.source()

    @cached_property
    def markers(self) -> re.Pattern[str]:
        """The strings in the template's source that it may look for inside texts, longest first, as one group."""
        found = {"<think>", "</think>"}
        for match in _STRING.finditer(self.source()):
            text = (match[1] or match[2] or "").replace("\\n", "\n").replace("\\'", "'").replace('\\"', '"')
            if 2 < len(text.strip()) <= 60 and _VISIBLE.search(text):
                found.update((text, text.strip()))
        return re.compile("(" + "|".join(re.escape(text) for text in sorted(found, key=len, reverse=True)) + ")")

    @cached_property
    def _call_form(self) -> tuple[bool, bool]:
        """Whether a message that only calls a tool must have no content at all, and `arguments` must be JSON text.

        Templates differ: some print a call only if its content is None, some fail on None, some print `arguments` as they are. The
        first form that prints a probe is taken.
        """
        for form in ((False, False), (False, True), (True, False), (True, True)):
            try:
                text = self._apply(_in_form(_PROBE_CALL, *form))
            except refusals():
                continue
            if text.count(_PROBE) >= 4 and f"{{'{_PROBE}': '{_PROBE}'}}" not in text:
                return form
        return False, False

    def _apply(self, messages: Messages) -> str:
        return self._tokenizer.apply_chat_template(messages, chat_template=self._chat_template, tokenize=False, **self._variables)

    def _as_read(self, messages: Messages) -> Messages:
        """Return the messages with tool calls in the form that the template reads."""
        if not any("tool_calls" in message for message in messages) or self._call_form == (False, False):
            return messages
        return _in_form(messages, *self._call_form)


def _in_form(messages: Messages, is_null: bool, is_json: bool) -> Messages:
    """Return the messages with None for empty content beside tool calls, and with `arguments` as JSON."""
    read: Messages = []
    for message in messages:
        if "tool_calls" in message:
            message = dict(message)
            if is_null:
                message["content"] = message["content"] or None
            if is_json:
                message["tool_calls"] = [
                    {**call, "function": _with_json_arguments(call["function"])} for call in message["tool_calls"]]
        read.append(message)
    return read


def _with_json_arguments(function: dict[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
