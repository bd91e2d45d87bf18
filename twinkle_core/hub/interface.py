"""The interface of a place that models and datasets come from."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

Kind = Literal["model", "dataset"]


class Hub(ABC):
    """A service, cache or package that turns an id into a folder on disk. Its registered name is the URI scheme.

    Attributes:
        is_remote: whether it brings what strangers wrote, so that trust in code is asked for before weights are fetched.
    """

    is_remote: ClassVar[bool] = True

    @abstractmethod
    def find_cached(self, repo_id: str, *, kind: Kind, revision: str | None = None, patterns: Sequence[str] = ()) -> Path | None:
        """Return the folder that holds `repo_id` already, complete, without a request; else None.

        `patterns`: file patterns that are enough, e.g. those of a tokenizer; a file must match the first. None means everything.
        """

    @abstractmethod
    def fetch(self, repo_id: str, *, kind: Kind, revision: str | None = None, patterns: Sequence[str] = ()) -> Path:
        """Return the folder of `repo_id`, downloading what is missing of the files that match `patterns`.

        Raises: `HubError` with what was looked for, where, and what to do.
        """

    @abstractmethod
    def upload(self, folder: Path, repo_id: str, *, kind: Kind, private: bool = True) -> str:
        """Upload a folder as `repo_id`, made if need be, and return its URI. Raises: `HubError`."""

    @abstractmethod
    def describe(self) -> str:
        """Return one line for `twinkle doctor`: where the cache is, and whether the service can be reached."""
