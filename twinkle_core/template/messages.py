"""From a conversation as a row holds it to the form that every chat template can read.

Copies, never mutates. Knows the shape of messages and tools, nothing of any template's text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from twinkle_core.errors import TemplateError

TRAJECTORY_KEYS = ("messages", "tools", "user_data")

_REASONING = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)


def drop_nulls(value: Any) -> Any:
    """Return a copy of `value` without the keys whose value is None, at any depth.

    Arrow gives all dicts of a column the same keys and fills what a row did not have with None.
    """
    if isinstance(value, Mapping):
        given = cast("Mapping[str, Any]", value)
        return {key: drop_nulls(item) for key, item in given.items() if item is not None}
    if isinstance(value, list | tuple):
        return [drop_nulls(item) for item in cast("Sequence[Any]", value)]
    return value


def split_reasoning(content: str) -> tuple[str | None, str]:
    """Return (reasoning, answer) of text that begins with one `<think>` block, else (None, `content`)."""
    if "</think>" not in content:
        return None, content
    match = _REASONING.fullmatch(content)
    if match is None or content.count("<think>") != 1 or content.count("</think>") != 1:
        return None, content
    return match[1].strip("\n"), match[2].lstrip("\n")


def clean_messages(messages: object, *, knows_reasoning: bool, row: int | None) -> list[dict[str, Any]]:
    """Return `messages` as new dicts: no None values, `content` a string, `arguments` a dict, `<think>` taken apart.

    Args:
        messages: the `messages` of a trajectory.
        knows_reasoning: whether the template reads `reasoning_content`; only then `<think>` leaves `content`.
        row: position of the row, for errors.

    Raises: `TemplateError` for anything that is not a conversation.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise TemplateError(f"`messages` is {_shown(messages)}. A conversation is a non-empty list of dicts with `role` and "
                            "`content`.", row=row)
    return [_clean_message(message, knows_reasoning, row, turn) for turn, message in enumerate(cast("Sequence[Any]", messages))]


def _clean_message(message: object, knows_reasoning: bool, row: int | None, turn: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TemplateError(f"the message is {_shown(message)}. It must be a dict with `role` and `content`.", row=row, turn=turn)
    given = cast("Mapping[str, Any]", message)
    role, content = given.get("role"), given.get("content")
    if not isinstance(role, str) or not role:
        raise TemplateError(f"the message's `role` is {_shown(role)}. Use `system`, `user`, `assistant` or `tool`.",
                            row=row, turn=turn)
    text = content if isinstance(content, str) else _joined(content, row, turn)
    clean: dict[str, Any] = {"role": role, "content": text}
    if len(given) > 2 or "content" not in given:
        for key, value in given.items():
            if value is not None and key not in ("role", "content", "tool_calls"):
                clean[key] = drop_nulls(value)
        if given.get("tool_calls"):
            clean["tool_calls"] = _clean_calls(given["tool_calls"], row, turn)
    if not isinstance(clean.get("reasoning_content", ""), str):
        raise TemplateError(f"the message's `reasoning_content` is {_shown(clean['reasoning_content'])}. Use text, or leave it "
                            "out.", row=row, turn=turn)
    if knows_reasoning and role == "assistant" and "reasoning_content" not in clean and "</think>" in text:
        reasoning, answer = split_reasoning(text)
        if reasoning is not None:
            clean["content"], clean["reasoning_content"] = answer, reasoning
    return clean


def _joined(content: object, row: int | None, turn: int) -> str:
    """Return the text of a list of parts; nothing at all, as in a turn that only calls tools, is the empty text."""
    if content is None:
        return ""
    if not isinstance(content, list | tuple):
        raise TemplateError(f"the message's `content` is {_shown(content)}. It must be text, or a list of parts such as "
                            '{"type": "text", "text": "..."}.', row=row, turn=turn)
    texts: list[str] = []
    for part in cast("Sequence[Any]", content):
        text = part.get("text") if isinstance(part, Mapping) else part  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if not isinstance(text, str):
            raise TemplateError(f"`content` has the part {_shown(part)}. Only parts of text can be encoded: "  # pyright: ignore[reportUnknownArgumentType]
                                '{"type": "text", "text": "..."}.', row=row, turn=turn)
        texts.append(text)
    return "".join(texts)


def _clean_calls(calls: object, row: int | None, turn: int) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise TemplateError(f"`tool_calls` is {_shown(calls)}. It must be a list of "
                            '{"type": "function", "function": {"name": ..., "arguments": {...}}}.', row=row, turn=turn)
    clean: list[dict[str, Any]] = []
    for call in cast("Sequence[Any]", calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):  # pyright: ignore[reportUnknownMemberType]
            raise TemplateError(f"`tool_calls` holds {_shown(call)}. A call is "  # pyright: ignore[reportUnknownArgumentType]
                                '{"type": "function", "function": {"name": ..., "arguments": {...}}}.', row=row, turn=turn)
        named = cast("Mapping[str, Any]", function)
        arguments = parse_arguments(named.get("arguments"), named["name"], row=row, turn=turn)
        outer = {key: value for key, value in cast("Mapping[str, Any]", call).items()
                 if value is not None and key not in ("function", "type", "name", "arguments")}
        clean.append({"type": call.get("type") or "function", **outer, "function": {"name": named["name"], "arguments": arguments}})
    return clean


def parse_arguments(arguments: object, name: str, *, row: int | None = None, turn: int | None = None) -> dict[str, Any]:
    """Return the arguments of a call as a dict, from a dict, its JSON, or None for no arguments.

    A null in JSON text was written there and stays; a None in a dict is what Arrow fills in and goes.
    """
    if arguments is None or arguments == "":
        return {}
    value: Any = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except ValueError as error:
            raise TemplateError(f"the `arguments` of the call of `{name}` are {_shown(arguments)}, which is not JSON ({error}). "
                                "Pass a dict or its JSON.", row=row, turn=turn) from error
    if not isinstance(value, Mapping):
        raise TemplateError(f"the `arguments` of the call of `{name}` are {_shown(arguments)}. Pass a dict or its JSON.",
                            row=row, turn=turn)
    return dict(cast("Mapping[str, Any]", value)) if isinstance(arguments, str) else drop_nulls(value)


def clean_tools(tools: object, *, row: int | None) -> list[dict[str, Any]] | None:
    """Return the descriptions of tools, or None when there are none; a list of dicts or its JSON."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise TemplateError(
                f"`tools` is {_shown(tools)}, which is not JSON ({error}). Pass a list of dicts.", row=row) from error
    if not tools:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in cast("Sequence[Any]", tools)):
        raise TemplateError(f"`tools` is {_shown(tools)}. Pass a list of dicts, each the JSON schema of a function.", row=row)
    return cast("list[dict[str, Any]]", drop_nulls(tools))


def _shown(value: object) -> str:
    """Return what an error says of a value: its type and, cut short, itself."""
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} of type {type(value).__name__}"
