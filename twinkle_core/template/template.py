"""The public class of chat templates: conversations to tokens and labels, tokens to messages.

Renders with the tokenizer's own chat template, so tokens are those of `apply_chat_template`. What is supervised is found by
`twinkle_core.template.labels`; padding, shifting and tensors are the processor's.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from twinkle_core.data_format import IGNORE_INDEX, InputFeature, Message, ToolCall, Trajectory, extend_feature
from twinkle_core.errors import ArgumentError, MissingExtraError, TemplateError, checks_keywords, did_you_mean, listing
from twinkle_core.template.calls import parse_json_calls
from twinkle_core.template.labels import Conversation, Labeller, Ranges, tools_key
from twinkle_core.template.messages import TRAJECTORY_KEYS, clean_messages, clean_tools, split_reasoning
from twinkle_core.template.render import Renderer, Tools, refusals
from twinkle_core.template.stability import is_prefix_stable
from twinkle_core.template.truncation import TruncationStrategy, check_truncation, truncate
from twinkle_core.warning import warn


class Template:
    """The chat template of one model.

    A subclass may override `parse_tool_calls` for its family's syntax, `variables` for what the template is rendered with, and
    `split_reasoning` for the form of its reasoning. A template reads and returns plain Python values and needs no torch.

    Args:
        model_id: whose tokenizer and chat template to use: `ms://`, `hf://`, `tiny://` or a folder.
        max_length: tokens at most in one feature; None is no limit.
        truncation_strategy: what becomes of longer ones: "raise", "left" (cut from the left), "right", "split" (several
            features) or "delete".
        default_system: system message of conversations that have none.
        enable_thinking: the switch of templates that have one; None leaves it to the template.
        chat_template: replaces the tokenizer's own: its text, or the path of a file.
        variables: further variables that the chat template reads.
        revision: branch, tag or commit of the model.
        trust_remote_code: whether Python code inside the repository may run; None asks `TWINKLE_TRUST_REMOTE_CODE`.
        tokenizer: an already loaded fast tokenizer; then `model_id` only names the template in errors.

    Raises: `HubError` if there is no such model; `TemplateError` if its tokenizer has no chat template or is not a fast one.
    """

    @checks_keywords
    def __init__(
        self,
        model_id: str,
        *,
        max_length: int | None = None,
        truncation_strategy: TruncationStrategy = "raise",
        default_system: str | None = None,
        enable_thinking: bool | None = None,
        chat_template: str | Path | None = None,
        variables: Mapping[str, Any] | None = None,
        revision: str | None = None,
        trust_remote_code: bool | None = None,
        tokenizer: Any = None,
    ) -> None:
        check_truncation(max_length, truncation_strategy)
        if enable_thinking is not None and not isinstance(enable_thinking, bool):
            raise ArgumentError(f"`enable_thinking={enable_thinking!r}`: use True, False, or None to leave it to the template.")
        self.model_id = model_id
        self.max_length = max_length
        self.truncation_strategy: TruncationStrategy = truncation_strategy
        self.default_system = default_system
        self.enable_thinking = enable_thinking
        self._variables = dict(variables or {})
        self.tokenizer = tokenizer if tokenizer is not None else load_tokenizer(
            model_id, revision=revision, trust_remote_code=trust_remote_code)
        if not getattr(self.tokenizer, "is_fast", False):
            raise TemplateError(f"the tokenizer of `{model_id}` is a `{type(self.tokenizer).__name__}`, which does not say where "
                                "its tokens come from. Use a model with a `tokenizer.json`.")
        self.chat_template = _read_chat_template(chat_template)
        if self.chat_template is None and not self.tokenizer.chat_template:
            raise TemplateError(f"the tokenizer of `{model_id}` has no chat template. Pass `chat_template=`, its text or "
                                "the path of a file.")
        self._prepare()
        if enable_thinking is not None and "enable_thinking" not in self._renderer.source():
            warn(
                f"The chat template {self.name} has no switch `enable_thinking`; {enable_thinking} changes nothing.")

    def _prepare(self) -> None:
        self._renderer = Renderer(self.tokenizer, self.chat_template, self.variables())
        self._labeller = Labeller(self._renderer, self.name)

    def __getstate__(self) -> dict[str, Any]:
        derived = ("_renderer", "_labeller", "is_prefix_stable", "stop_token_ids")
        return {key: value for key, value in self.__dict__.items() if key not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    @property
    def name(self) -> str:
        """How errors call this template: its class and model."""
        return f"`{type(self).__name__}` of `{self.model_id}`"

    def options(self) -> dict[str, Any]:
        """Return the arguments that decide how conversations are rendered, as far as they were said."""
        said = {"default_system": self.default_system, "enable_thinking": self.enable_thinking, "chat_template": self.chat_template,
                "variables": self._variables or None}
        return {name: value for name, value in said.items() if value is not None}

    def variables(self) -> dict[str, Any]:
        """Return what the chat template finds besides messages, tools and special tokens."""
        switch = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {**switch, **self._variables}

    def encode(self, trajectory: Trajectory | Mapping[str, Any], *, add_generation_prompt: bool = False) -> InputFeature:
        """Return the feature of one conversation.

        Args:
            trajectory: `messages`, and if need be `tools` and `user_data`; not mutated.
            add_generation_prompt: encode the prompt: a last assistant message is left out, the generation prompt is appended,
                and the feature has no labels.

        Raises: `TemplateError` if it cannot be rendered or labelled, or if truncation leaves nothing or makes several features.
        """
        features = self._encode([trajectory], add_generation_prompt, is_batch=False)[0]
        if len(features) != 1:
            what = "nothing that can be learned" if not features else f"{len(features)} features"
            raise TemplateError(f"truncation to `max_length={self.max_length}` with `{self.truncation_strategy}` leaves {what}. "
                                "Use `batch_encode`, which returns a list a row, or raise `max_length`.")
        return features[0]

    def batch_encode(
        self, trajectories: Sequence[Trajectory | Mapping[str, Any]], *, add_generation_prompt: bool = False,
    ) -> list[list[InputFeature]]:
        """Return the features of each conversation: one, none if truncation left nothing to learn, several if it split.

        Raises: `TemplateError` whose `row` is the position in `trajectories`.
        """
        return self._encode(trajectories, add_generation_prompt, is_batch=True)

    def encode_text(self, text: str) -> InputFeature:
        """Return the feature of plain text, for language modelling: every token is supervised, the end token is appended."""
        features = self.batch_encode_text([text])[0]
        if len(features) != 1:
            raise TemplateError(f"truncation to `max_length={self.max_length}` makes {len(features)} features of the text. Use "
                                "`batch_encode_text`, which returns a list a row, or raise `max_length`.")
        return features[0]

    def batch_encode_text(self, texts: Sequence[str]) -> list[list[InputFeature]]:
        """Return the features of plain texts, a list a text, as `encode_text` makes them."""
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise TemplateError(f"the tokenizer of `{self.model_id}` has no end token (`eos_token`), which plain text "
                                "must end with.")
        for row, text in enumerate(texts):
            if not isinstance(text, str) or not text:
                raise TemplateError(f"`text` is {text!r} of type {type(text).__name__}. It must be text, and not empty.", row=row)
        if not texts:
            return []
        encoded = self.tokenizer(list(texts), return_attention_mask=False, return_token_type_ids=False, verbose=False)["input_ids"]
        rows: list[list[InputFeature]] = []
        for row, ids in enumerate(encoded):
            if ids[-1:] != [eos]:
                ids = [*ids, eos]
            rows.append(self._features(ids, list(ids), None, row))
        return rows

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def parse(self, tokens: Sequence[int], *, tools: Sequence[Mapping[str, Any]] | None = None) -> Message:
        """Return the assistant's message that `tokens` are: answer, reasoning and tool calls apart.

        `tokens` are what follows a generation prompt, with or without the end-of-turn token. The supervised tokens of an encoded
        turn give the turn's message again. Without an end token and an end of the reasoning that the generation prompt opened,
        all of it is reasoning. `tools` are the conversation's tools: they tell the types of arguments that a template prints bare.
        """
        text = self.decode(tokens)
        ends = [end for end in (self._labeller.end_of_turn, self.tokenizer.eos_token) if end]
        end = next((end for end in ends if text.rstrip().endswith(end)), None)
        if end is not None:
            text = text.rstrip().removesuffix(end)
        reasoning, text = self.split_reasoning(text, is_complete=end is not None)
        text, calls = self.parse_tool_calls(text, tools=tools)
        message: Message = {"role": "assistant", "content": text}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def split_reasoning(self, text: str, *, is_complete: bool) -> tuple[str | None, str]:
        """Return (reasoning, answer) of what the model wrote; `is_complete` says whether it ended by itself."""
        opened = self._labeller.generation_prompt.rstrip().endswith("<think>")
        if "</think>" in text and not text.lstrip().startswith("<think>"):
            text = "<think>" + text
        elif opened and not is_complete and "</think>" not in text:
            return text.strip("\n"), ""
        return split_reasoning(text)

    def parse_tool_calls(
        self, text: str, *, tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[str, list[ToolCall]]:
        """Return `text` without its tool calls, and the calls. Here: JSON in `<tool_call>` tags, which needs no `tools`."""
        return parse_json_calls(text)

    def concat_input_feature(
        self, feature: InputFeature, tokens: Sequence[int], *, logprobs: Sequence[float] | None = None,
    ) -> InputFeature:
        """Return `feature`, most often a prompt, with the supervised `tokens` behind it, as `extend_feature` does."""
        return extend_feature(feature, tokens, logprobs=logprobs)

    @cached_property
    def is_prefix_stable(self) -> bool:
        """Whether a conversation's tokens stay as they are when turns are added, reasoning and tool calls included."""
        return is_prefix_stable(self._renderer)

    @cached_property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end an answer: the end-of-turn token of the template, if it is one token, and the tokenizer's end token."""
        stop: list[int] = self.tokenizer.encode(self._labeller.end_of_turn, add_special_tokens=False)
        if len(stop) != 1:
            stop = []
        eos = self.tokenizer.eos_token_id
        return stop if eos is None or eos in stop else [*stop, eos]

    def _encode(
        self, trajectories: Sequence[Trajectory | Mapping[str, Any]], is_prompt: bool, *, is_batch: bool,
    ) -> list[list[InputFeature]]:
        if not trajectories:
            return []
        rows = self._clean(trajectories, is_prompt, is_batch)
        texts = self._render(rows, is_prompt)
        encoded = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False)
        features: list[list[InputFeature]] = []
        for conversation, trajectory, text, ids, encoding in zip(
            rows, trajectories, texts, encoded["input_ids"], encoded.encodings, strict=True,
        ):
            if is_prompt:
                self._labeller.check_prompt(conversation)
                labels = None
            else:
                labels = _labels(ids, encoding, self._labeller.ranges(conversation, text))
                if labels is None:
                    raise TemplateError(
                        f"the template {self.name} marks no token as supervised. A row needs an assistant message with an answer; "
                        "prompts are encoded with `add_generation_prompt=True`.", row=conversation.row)
            features.append(self._features(ids, labels, trajectory.get("user_data"), conversation.row))
        return features

    def _clean(
        self, trajectories: Sequence[Trajectory | Mapping[str, Any]], is_prompt: bool, is_batch: bool,
    ) -> list[Conversation]:
        rows: list[Conversation] = []
        seen: object = None
        tools: Tools = None
        key = ""
        for position, trajectory in enumerate(trajectories):
            row = position if is_batch else None
            _check_trajectory(trajectory, row)
            messages = clean_messages(trajectory["messages"], knows_reasoning=self._renderer.knows_reasoning, row=row)
            if is_prompt and messages[-1]["role"] == "assistant":
                del messages[-1]
            if self.default_system is not None and (not messages or messages[0]["role"] not in ("system", "developer")):
                messages.insert(0, {"role": "system", "content": self.default_system})
            if not messages:
                raise TemplateError("the conversation is one assistant message, so there is no prompt to encode.", row=row)
            if trajectory.get("tools") is not seen:
                seen = trajectory.get("tools")
                tools = clean_tools(seen, row=row)
                key = tools_key(tools)
            rows.append(Conversation(messages, tools, key, row))
        return rows

    def _render(self, rows: list[Conversation], is_prompt: bool) -> list[str]:
        """Return the texts of `rows`, rendered together where they share tools."""
        groups: dict[str, list[int]] = {}
        for position, conversation in enumerate(rows):
            groups.setdefault(conversation.tools_key, []).append(position)
        texts = [""] * len(rows)
        for positions in groups.values():
            batch, tools = [rows[position].messages for position in positions], rows[positions[0]].tools
            try:
                rendered = self._renderer.render_batch(batch, tools, add_generation_prompt=is_prompt)
            except refusals():  # one row was refused; found below
                rendered = [self._render_one(rows[position], is_prompt) for position in positions]
            for position, text in zip(positions, rendered, strict=True):
                texts[position] = text
        return texts

    def _render_one(self, conversation: Conversation, is_prompt: bool) -> str:
        try:
            return self._renderer.render(conversation.messages, conversation.tools, add_generation_prompt=is_prompt)
        except refusals() as error:
            roles = ", ".join(message["role"] for message in conversation.messages)
            raise TemplateError(f"the template {self.name} refuses the conversation ({roles}): {error}. Bring the messages into "
                                "an order that it takes, or pass another `chat_template`.", row=conversation.row) from error

    def _features(
        self, ids: list[int], labels: list[int] | None, user_data: dict[str, Any] | None, row: int | None,
    ) -> list[InputFeature]:
        features: list[InputFeature] = []
        for piece, piece_labels in truncate(ids, labels, max_length=self.max_length, strategy=self.truncation_strategy, row=row):
            feature: InputFeature = {"input_ids": piece}
            if piece_labels is not None:
                feature["labels"] = piece_labels
            if user_data is not None:
                feature["user_data"] = user_data
            features.append(feature)
        return features


def load_tokenizer(model_id: str, *, revision: str | None = None, trust_remote_code: bool | None = None) -> Any:
    """Return the tokenizer of a model. Raises: `HubError`; `MissingExtraError` without transformers."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError("Templates need transformers and jinja2. Run: pip install 'twinkle-core[data]'") from error
    from twinkle_core import settings
    from twinkle_core.hub import resolve_model

    is_trusted = settings.trust_remote_code() if trust_remote_code is None else trust_remote_code
    folder = resolve_model(model_id, revision=revision, tokenizer_only=True, trust_remote_code=is_trusted)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=is_trusted, local_files_only=True)
    except Exception as error:  # the boundary to foreign code: tokenizers raises bare exceptions for a damaged file
        raise TemplateError(f"the tokenizer of `{model_id}` in {folder} cannot be loaded: {type(error).__name__}: {error}. Fetch "
                            "the model again, or name one that has a `tokenizer.json`.") from error


def _read_chat_template(chat_template: str | Path | None) -> str | None:
    """Return the text of a template given as text or as a path; text is told by its braces or line ends."""
    if chat_template is None or (isinstance(chat_template, str) and ("{" in chat_template or "\n" in chat_template)):
        return chat_template
    path = Path(chat_template)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"`chat_template={str(chat_template)!r}` is neither a jinja template (it has no braces) nor a file "
                            f"that can be read: {error}. Pass the text of a template, or the path of a file.") from error


def _check_trajectory(trajectory: object, row: int | None) -> None:
    if not isinstance(trajectory, Mapping):
        raise TemplateError(f"the conversation is a {type(trajectory).__name__}. Pass a dict with `messages`.", row=row)
    for key in cast("Mapping[str, Any]", trajectory):
        if key not in TRAJECTORY_KEYS:
            raise TemplateError(f"the conversation has the unknown key `{key}`.{did_you_mean(key, TRAJECTORY_KEYS)} It has: "
                                f"{listing(TRAJECTORY_KEYS)}. Put what is to be carried along into `user_data`.", row=row)
    if "messages" not in trajectory:
        raise TemplateError("the conversation has no `messages`. Pass a dict with `messages`, a list of turns.", row=row)


def _labels(ids: list[int], encoding: Any, ranges: Ranges) -> list[int] | None:
    """Return the labels of `ids`: a token is supervised if it begins inside a range. None if none does."""
    labels = [IGNORE_INDEX] * len(ids)
    starts: list[int] | None = None
    is_empty = True
    for low, high in ranges:
        if high <= low:
            continue
        if starts is None:
            starts = [offset[0] for offset in encoding.offsets]
        first, last = bisect_left(starts, low), bisect_left(starts, high)
        if first < last:
            labels[first:last] = ids[first:last]
            is_empty = False
    return None if is_empty else labels
