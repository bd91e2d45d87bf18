"""The column layouts that `Dataset.encode()` recognises by itself, and how a row of each becomes a conversation.

A layout is recognised by the names of its columns, in the order of `LAYOUTS`: the first whose columns are all there. Rows are
not mutated. `user_data` is carried along under every layout; columns that a layout does not name are left out.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict, cast

from twinkle_core.data_format import Message, Trajectory
from twinkle_core.errors import DataError, listing
from twinkle_core.preprocessor.builtin import instruction_text

ROLES = {
    "system": "system", "user": "user", "assistant": "assistant", "tool": "tool", "developer": "developer",
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant", "model": "assistant",
    "bot": "assistant", "observation": "tool", "function_response": "tool", "function_call": "assistant",
}
"""What `from` or `role` says in ShareGPT files -> role."""


class Pair(TypedDict):
    """A preference row: two conversations with the same prompt."""

    chosen: Trajectory
    rejected: Trajectory
    user_data: NotRequired[dict[str, Any]]


class Text(TypedDict):
    """A row of plain text: it is trained on as it stands, without a chat template."""

    text: str
    user_data: NotRequired[dict[str, Any]]


Example = Trajectory | Pair | Text


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A set of columns and what they mean.

    Attributes:
        name: what users call it.
        required: the columns that must be there.
        optional: columns that are used when they are there.
        convert: from a row (null columns left out) to an example. Raises: `DataError` naming the column.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    convert: Callable[[Mapping[str, Any]], Example]

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that the layout reads."""
        return (*self.required, *self.optional, "user_data")

    def example(self, row: Mapping[str, Any]) -> Example:
        """Return the example of `row`, with its `user_data`. Raises: `DataError` naming the column."""
        present = {name: value for name, value in row.items() if value is not None}
        missing = [name for name in self.required if name not in present]
        if missing:
            raise DataError(f"the column {listing(missing)} is empty. Fill it, or leave the row out (`on_bad_row=\"skip\"`).")
        example = self.convert(present)
        if "user_data" in present:
            example["user_data"] = _user_data(present["user_data"])
        return example


def find_layout(columns: Sequence[str]) -> Layout:
    """Return the layout of rows with these columns. Raises: `DataError` that lists the columns and the layouts known."""
    for layout in LAYOUTS:
        if all(name in columns for name in layout.required):
            return layout
    known = "; ".join(f"{layout.name} ({', '.join(layout.required)})" for layout in LAYOUTS)
    ready = "`dataset.map(\"GSM8KProcessor\")` or " if {"question", "answer"} <= set(columns) else ""
    raise DataError(f"The columns {listing(columns)} are no layout that is known. Known: {known}. Turn the rows into `messages` "
                    f"with {ready}`dataset.map(function)`.")


def _user_data(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(f"`user_data` is a {type(value).__name__}. Use a dict, e.g. {{\"answer\": ...}}.")
    return dict(value)


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise DataError(f"the column `{column}` holds a {type(value).__name__}: {str(value)[:60]!r}. It must be text.")
    return value


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _messages(value: Any, column: str) -> list[Message]:
    """`value` as messages in the standard shape, without null keys; a ShareGPT list is understood too."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _from_json(value, column)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise DataError(f"the column `{column}` holds a {type(value).__name__}, not a list of messages. Write it as "
                        "`[{\"role\": \"user\", \"content\": \"...\"}, ...]`.")
    if not value:
        raise DataError(f"the column `{column}` holds no message. A conversation has at least one turn; remove the row.")
    return [turn if _is_plain(turn) else _message(turn, f"`{column}[{index}]`") for index, turn in enumerate(value)]


def _is_plain(turn: Any) -> bool:
    """Whether a turn is a role and a text and nothing else, as most are: nothing to clean then."""
    return type(turn) is dict and len(turn) == 2 and type(turn.get("role")) is str and type(turn.get("content")) is str


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, Mapping):
        raise DataError(f"{where} is a {type(turn).__name__}, not a message: {str(turn)[:60]!r}. Use {{\"role\": ..., \"content\": "
                        "...}}.")
    message = {key: value for key, value in turn.items() if value is not None} if None in turn.values() else dict(turn)
    if "from" in message and "role" not in message:
        return _sharegpt_message(message, where)
    role = message.get("role")
    if not isinstance(role, str):
        raise DataError(f"{where} has no `role` ({listing(map(str, message))} are there). Use {{\"role\": ..., \"content\": ...}}.")
    if "tool_calls" in message:
        calls = message["tool_calls"]
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise DataError(f"{where} has `tool_calls` of type {type(calls).__name__}. Use a list.")
        message["tool_calls"] = [_tool_call(call, where) for call in calls]
        if not calls:
            del message["tool_calls"]
    if "content" not in message and "tool_calls" not in message and "reasoning_content" not in message:
        raise DataError(f"{where} has no `content` ({listing(map(str, message))} are there).")
    return cast(Message, message)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """A call without null keys; what stands inside its `arguments` is the user's and is left alone."""
    if not isinstance(call, Mapping):
        raise DataError(f"{where} has a tool call of type {type(call).__name__}. Use {{\"type\": \"function\", \"function\": "
                        f"{{\"name\": "
                        "..., \"arguments\": ...}}}.")
    cleaned = {key: value for key, value in call.items() if value is not None}
    if isinstance(cleaned.get("function"), Mapping):
        cleaned["function"] = {key: value for key, value in cleaned["function"].items() if value is not None}
    return cleaned


def _sharegpt_message(message: Mapping[str, Any], where: str) -> Message:
    said, value = message["from"], message.get("value", message.get("content"))
    role = ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise DataError(f"{where} is from {said!r}. Known: {listing(ROLES)}.")
    if value is None:
        raise DataError(f"{where} has no `value`. Give it the text of the turn.")
    if said == "function_call":
        function = _from_json(value, where) if isinstance(value, str) else value
        return cast(Message, {"role": role, "content": "", "tool_calls": [{"type": "function", "function": function}]})
    return cast(Message, {"role": role, "content": value})


def _from_json(text: str, column: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{column} holds text that is not JSON: {error}.") from error


def _trajectory(messages: list[Message], row: Mapping[str, Any]) -> Trajectory:
    """The conversation of `messages` with the row's `system` text and `tools`."""
    if "system" in row and row["system"] != "" and messages[0]["role"] != "system":
        messages = [_turn("system", _text(row, "system")), *messages]
    trajectory: Trajectory = {"messages": messages}
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _from_json(tools, "the column `tools`") if tools.strip() else None
    if tools:
        if not isinstance(tools, Sequence):
            raise DataError(f"the column `tools` holds a {type(tools).__name__}. Use a list of function descriptions, or its JSON.")
        trajectory["tools"] = list(tools)
    return trajectory


def _from_messages(row: Mapping[str, Any]) -> Trajectory:
    return _trajectory(_messages(row["messages"], "messages"), row)


def _from_conversations(column: str) -> Callable[[Mapping[str, Any]], Trajectory]:
    return lambda row: _trajectory(_messages(row[column], column), row)


def _from_query(row: Mapping[str, Any]) -> Trajectory:
    messages: list[Message] = []
    history: Any = row.get("history") or ()
    if isinstance(history, str) or not isinstance(history, Sequence):
        raise DataError(f"the column `history` holds a {type(history).__name__}. Use a list of [query, response] pairs.")
    for index, turn in enumerate(history):
        if isinstance(turn, Mapping):
            messages.append(_message(turn, f"`history[{index}]`"))
        elif isinstance(turn, Sequence) and len(turn) == 2 and all(isinstance(text, str) for text in turn):
            messages += [_turn("user", turn[0]), _turn("assistant", turn[1])]
        else:
            raise DataError(f"`history[{index}]` is {str(turn)[:60]!r}. Use [query, response] pairs of text.")
    messages += [_turn("user", _text(row, "query")), _turn("assistant", _text(row, "response"))]
    return _trajectory(messages, row)


def _from_instruction(row: Mapping[str, Any]) -> Trajectory:
    extra = _text(row, "input") if "input" in row else ""
    return _trajectory([_turn("user", instruction_text(_text(row, "instruction"), extra)),
                        _turn("assistant", _text(row, "output"))], row)


def _side(value: Any, column: str, role: str) -> list[Message]:
    """Text, one message or a list of messages, as messages."""
    if isinstance(value, str):
        return [_turn(role, value)]
    return [_message(value, f"`{column}`")] if isinstance(value, Mapping) else _messages(value, column)


def _from_prompt(row: Mapping[str, Any]) -> Trajectory:
    return _trajectory(_side(row["prompt"], "prompt", "user") + _side(row["completion"], "completion", "assistant"), row)


def _from_preference(row: Mapping[str, Any]) -> Pair:
    prompt = _side(row["prompt"], "prompt", "user") if "prompt" in row else []
    sides: dict[str, Trajectory] = {}
    for column in ("chosen", "rejected"):
        messages = _side(row[column], column, "assistant")
        if not _begins_with(messages, prompt):
            messages = prompt + messages
        if messages[-1]["role"] != "assistant":
            raise DataError(f"the column `{column}` ends with a message of `{messages[-1]['role']}`. It must end with the "
                            "assistant's.")
        if len(messages) == 1:
            raise DataError(f"the column `{column}` holds an answer without a prompt. Add a column `prompt`, or make it a list of "
                            "messages.")
        sides[column] = _trajectory(messages, row)
    return {"chosen": sides["chosen"], "rejected": sides["rejected"]}


def _begins_with(messages: list[Message], prompt: list[Message]) -> bool:
    """Whether `messages` hold the prompt already, after a system text of their own."""
    own = messages[1:] if messages[0]["role"] == "system" and prompt[:1] and prompt[0]["role"] != "system" else messages
    return own[:len(prompt)] == prompt


def _from_text(row: Mapping[str, Any]) -> Text:
    return {"text": _text(row, "text")}


_CONTEXT = ("system", "tools")
LAYOUTS = (
    Layout(name="chosen/rejected", required=("chosen", "rejected"), optional=("prompt", *_CONTEXT), convert=_from_preference),
    Layout(name="messages", required=("messages",), optional=_CONTEXT, convert=_from_messages),
    Layout(name="conversations", required=("conversations",), optional=_CONTEXT, convert=_from_conversations("conversations")),
    Layout(name="conversation", required=("conversation",), optional=_CONTEXT, convert=_from_conversations("conversation")),
    Layout(name="query/response", required=("query", "response"), optional=("history", *_CONTEXT), convert=_from_query),
    Layout(name="instruction/input/output", required=("instruction", "output"), optional=("input", *_CONTEXT),
           convert=_from_instruction),
    Layout(name="prompt/completion", required=("prompt", "completion"), optional=_CONTEXT, convert=_from_prompt),
    Layout(name="text", required=("text",), convert=_from_text),
)


def prompt_of(example: Example) -> Trajectory:
    """Return the conversation without its last assistant message: what a sampler continues.

    Raises: `DataError` if nothing is left, or the example is plain text, which has no turns.
    """
    if "text" in example:
        raise DataError("plain text has no turns, so there is no prompt to generate from. Use a layout with messages.")
    trajectory = cast(Trajectory, example.get("chosen", example))
    messages = trajectory["messages"]
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise DataError("the conversation holds an assistant message only, so there is no prompt to generate from.")
    prompt = cast(Trajectory, {**trajectory, "messages": messages})
    if "user_data" in example:
        prompt["user_data"] = example["user_data"]
    return prompt
