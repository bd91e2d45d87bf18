"""From what a user passes to `sample` to prompts that fit the model.

Templates render conversations; here their result is held against the model's vocabulary and positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from twinkle_core.data_format import InputFeature, SampleResponse, check_feature, extend_feature
from twinkle_core.errors import ArgumentTypeError, SamplerError
from twinkle_core.processor.tokens import Limits, integers

if TYPE_CHECKING:
    from twinkle_core.template.template import Template


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A checked prompt: its tokens, what its feature carries along, and how many tokens may follow."""

    tokens: list[int]
    carried: Mapping[str, Any]
    max_tokens: int

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float]) -> InputFeature:
        """Return prompt and completion as a feature: the completion is labelled, and has its log-probabilities."""
        return extend_feature(cast(InputFeature, {"input_ids": self.tokens, **self.carried}), tokens, logprobs=logprobs)


def read_prompts(inputs: Sequence[Any], template: "Template | None", limits: Limits, *, max_tokens: int) -> list[Prompt]:
    """Return the prompts of `inputs`, features or conversations, in order.

    A completion ends where the model's positions do, so a prompt near that end gets fewer than `max_tokens`.

    Raises:
        ArgumentTypeError: `inputs` is not a list of features or conversations.
        SamplerError: a prompt is empty, too long, or has a token that the model does not know; a conversation without a template.
        DataError: a feature has unknown keys, wrong lengths, or tokens that are no integers.
    """
    if isinstance(inputs, (str, bytes, Mapping)) or not isinstance(inputs, Sequence):
        raise ArgumentTypeError(f"`sample(inputs=)` got a {type(inputs).__name__}. Pass a list of features or of conversations.")
    return [_read(item, template, limits, max_tokens, where=f"inputs[{index}]") for index, item in enumerate(inputs)]


def _read(item: Any, template: "Template | None", limits: Limits, max_tokens: int, *, where: str) -> Prompt:
    if isinstance(item, (str, SampleResponse)) or not isinstance(item, Mapping):
        raise ArgumentTypeError(f"{where} is a {type(item).__name__}. Pass features with `input_ids`, or conversations "
                                '`{"messages": [{"role": "user", "content": "..."}]}` after `set_template`.')
    if "input_ids" not in item:
        if template is None:
            raise SamplerError(f"{where} has no `input_ids` but {', '.join(f'`{key}`' for key in item) or 'nothing'}. To sample "
                               'from conversations, call `sampler.set_template("Template")` (or a template of the model) first.')
        item = template.encode(item, add_generation_prompt=True)
    if len(item["input_ids"]) == 0:
        raise SamplerError(f"{where} is an empty prompt. A model continues at least one token; begin with the tokenizer's "
                           "beginning-of-text token if there is nothing to say.")
    feature = check_feature(item, where=where)
    tokens: list[int] = integers(feature["input_ids"], where=where, key="input_ids").tolist()
    wrong = next((token for token in tokens if not 0 <= token < limits.vocab_size), None)
    if wrong is not None:
        raise SamplerError(f"{where} has the token {wrong}, but the model's vocabulary is 0 to {limits.vocab_size - 1}. Encode it "
                           "with the tokenizer of this model.")
    room = max_tokens
    if limits.positions is not None:
        room = min(max_tokens, limits.positions - len(tokens))
        if room < min(max_tokens, 1):
            most = limits.positions - min(max_tokens, 1)
            raise SamplerError(f"{where} is {len(tokens)} tokens long, but the model has {limits.positions} positions"
                               f"{' and the completion needs one' if max_tokens else ''}. Shorten it to at most {most} tokens, "
                               "e.g. by the template's `max_length`.")
    carried = {key: item[key] for key in ("row_id", "pair_id", "user_data") if key in item}
    return Prompt(tokens=tokens, carried=carried, max_tokens=room)
