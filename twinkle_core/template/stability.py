"""Whether a chat template only ever appends: what it printed of a conversation stays when turns are added."""

from twinkle_core.template.render import Renderer, refusals
from twinkle_core.template.shape import Messages

_CALL = {"type": "function", "id": "call00000", "function": {"name": "look_up", "arguments": {"word": "tea"}}}
_ASK, _ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}
_PROBES: tuple[Messages, ...] = (
    [_ASK, _ANSWER, _ASK, _ANSWER],
    [_ASK, {**_ANSWER, "reasoning_content": "A thought."}, _ASK, {**_ANSWER, "reasoning_content": "Another."}],
    [_ASK, {"role": "assistant", "content": "", "tool_calls": [_CALL]},
     {"role": "tool", "content": "A drink.", "tool_call_id": "call00000", "name": "look_up"}, _ANSWER, _ASK, _ANSWER],
)


def is_prefix_stable(renderer: Renderer) -> bool:
    """Return whether each probe, cut off behind an assistant turn, is the beginning of the whole.

    A probe that the template refuses (it may know no tools) says nothing.
    """
    for probe in _PROBES:
        try:
            whole = renderer.render(probe)
            beginnings = [renderer.render(probe[:turn + 1]) for turn, message in enumerate(probe) if message["role"] == "assistant"]
        except refusals():
            continue
        if not all(whole.startswith(beginning) for beginning in beginnings):
            return False
    return True
