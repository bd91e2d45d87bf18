"""The interface of a preprocessor."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from twinkle_core.data_format import Trajectory


class Preprocessor(ABC):
    """Turns one row into one conversation. Rows are not mutated."""

    @abstractmethod
    def __call__(self, row: Mapping[str, Any]) -> Trajectory:
        """Return the conversation of `row`. Raises: `DataError` naming the column that is missing or wrong."""
