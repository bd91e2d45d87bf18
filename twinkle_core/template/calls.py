"""Tool calls in text: JSON inside `<tool_call>` tags, the most common form."""

import json
import re
from typing import Any, cast

from twinkle_core.data_format import ToolCall

CALL = re.compile(r"\n?<tool_call>(.*?)</tool_call>", re.DOTALL)


def function_call(name: str, arguments: dict[str, Any]) -> ToolCall:
    """Return a call in the shape of the OpenAI chat API."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def parse_json_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Return `text` without its well-formed `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` blocks, and the calls.

    A block that is not such JSON stays in the text: what a model wrote is not an error.
    """
    calls: list[ToolCall] = []

    def take(block: re.Match[str]) -> str:
        try:
            value: Any = json.loads(block[1])
        except ValueError:
            return block[0]
        given = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
        name, arguments = given.get("name"), given.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return block[0]
        calls.append(function_call(name, cast("dict[str, Any]", arguments)))
        return ""

    rest = CALL.sub(take, text)
    return (rest, calls) if calls else (text, [])
