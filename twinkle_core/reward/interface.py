"""The interface of a reward."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle_core.data_format import SampleResponse


class Reward(ABC):
    """Gives one number a sequence."""

    @abstractmethod
    def __call__(self, responses: Sequence[SampleResponse], user_data: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return the rewards of all sequences, in order. `user_data` has one entry a response."""
