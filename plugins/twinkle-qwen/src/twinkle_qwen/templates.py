"""The chat templates of the Qwen families.

Each renders with the tokenizer's own chat template; what is particular to a family is the form of its tool calls.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from twinkle_core.data_format import ToolCall
from twinkle_core.template.calls import function_call
from twinkle_core.template.template import Template

_CALL = re.compile(r"\n{0,2}<tool_call>\s*<function=([^>\n]+)>\n?(.*?)</function>\s*</tool_call>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>", re.DOTALL)
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


class Qwen2_5Template(Template):  # noqa: N801 - the family's own name
    """Qwen2.5: ChatML; a tool call is JSON in `<tool_call>` tags; no reasoning."""


class Qwen3Template(Template):
    """Qwen3: as Qwen2.5, with reasoning in `<think>` tags before the last answer.

    `enable_thinking=False` puts an empty think block into the prompt; rows without reasoning are trained that way.
    """


class Qwen3_5Template(Template):  # noqa: N801 - the family's own name
    """Qwen3.5: reasoning as Qwen3; a tool call is written in tags, one for each argument."""

    def parse_tool_calls(
        self, text: str, *, tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[str, list[ToolCall]]:
        """Return `text` without its tool calls, and the calls.

        Arguments are printed bare, so `"3"` and 3 look alike: the schemas in `tools` tell them apart; an argument of unknown type
        is read as JSON where it is JSON, else as text. A call that is not well formed stays in the text.
        """
        calls: list[ToolCall] = []

        def take(block: re.Match[str]) -> str:
            types = _argument_types(block[1], tools)
            arguments = {name: _argument(value, types.get(name)) for name, value in _PARAMETER.findall(block[2])}
            if _PARAMETER.sub("", block[2]).strip():
                return block[0]
            calls.append(function_call(block[1], arguments))
            return ""

        rest = _CALL.sub(take, text)
        return (rest, calls) if calls else (text, [])


def _argument_types(name: str, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Return argument -> JSON schema type, as far as the description of the function says."""
    for tool in tools or ():
        function = cast("Mapping[str, Any]", tool.get("function", tool))
        if function.get("name") == name:
            properties = cast("Mapping[str, Any]", (function.get("parameters") or {}).get("properties") or {})
            return {key: schema.get("type") for key, schema in properties.items() if isinstance(schema, Mapping)}
    return {}


def _argument(text: str, kind: Any) -> Any:
    """Return the value that was printed as `text`."""
    if kind == "string":
        return text
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, str) else value
