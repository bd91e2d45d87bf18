"""The interface of a reward, and what a reward of text sees of what was sampled."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from twinkle_core.data_format import SampleResponse, Trajectory
from twinkle_core.errors import DataError

UserData = Sequence[Mapping[str, Any] | None]


class Reward(ABC):
    """Gives one number a sequence."""

    @abstractmethod
    def __call__(self, responses: Sequence[SampleResponse | Trajectory], user_data: UserData | None = None) -> list[float]:
        """Return the rewards of all sequences, in order: what an advantage takes.

        Args:
            responses: what a sampler returned, or whole conversations, each of which counts as one sequence.
            user_data: what belongs to each prompt, e.g. the reference answer: one entry a response. None: what the sequences carry
                along themselves from the rows of the dataset.
        """


class TextReward(Reward):
    """A reward of a completion's text: subclass it and write `score`."""

    @abstractmethod
    def score(self, completion: str, user_data: Mapping[str, Any]) -> float:
        """Return the reward of one completion. `user_data` is empty where nothing belongs to its prompt."""

    def __call__(self, responses: Sequence[SampleResponse | Trajectory], user_data: UserData | None = None) -> list[float]:
        """Return the rewards of all sequences, in order."""
        return [float(self.score(text, data)) for text, data in completions(responses, user_data)]


class FunctionReward(TextReward):
    """A function `(completion, user_data) -> number` as a reward."""

    def __init__(self, function: Callable[[str, Mapping[str, Any]], float]) -> None:
        self.function = function

    def score(self, completion: str, user_data: Mapping[str, Any]) -> float:
        """Call the function."""
        return self.function(completion, user_data)


def completions(
    responses: Sequence[SampleResponse | Trajectory], user_data: UserData | None = None,
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the text and the user data of each sequence, in order.

    Of a conversation the text is its last message, the reasoning in front of it in `<think>` tags.

    Raises: `DataError` for another number of entries, or a conversation that does not end with the assistant.
    """
    if isinstance(responses, str | Mapping | SampleResponse):
        raise DataError(f"A reward got a {type(responses).__name__}. Pass a list of responses or of conversations.")
    if user_data is not None and len(user_data) != len(responses):
        raise DataError(f"`user_data` has {len(user_data)} entries for {len(responses)} responses. Pass one a response, or none "
                        "at all if the rows carry it.")
    for index, response in enumerate(responses):
        given = None if user_data is None else user_data[index] or {}
        if isinstance(response, SampleResponse):
            for sequence in response.sequences:
                yield sequence.decoded, given if given is not None else sequence.new_input_feature.get("user_data") or {}
        else:
            yield _last_answer(response, index), given if given is not None else response.get("user_data") or {}


def _last_answer(trajectory: Any, index: int) -> str:
    messages = cast("list[Mapping[str, Any]]", trajectory.get("messages") or []) if isinstance(trajectory, Mapping) else []
    if not messages or messages[-1].get("role") != "assistant":
        raise DataError(f"responses[{index}] is neither a `SampleResponse` nor a conversation that ends with the assistant. Pass "
                        "what `sample` returned, or conversations with the answer in them.")
    content, reasoning = messages[-1].get("content") or "", messages[-1].get("reasoning_content")
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    return f"<think>{reasoning}</think>\n{content}" if reasoning else content
