"""A template of which a test can work out the tokens by hand."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from twinkle_core.dataset import Dataset, DatasetMeta
from twinkle_core.errors import TemplateError
from twinkle_core.template.template import Template

settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")


class LetterTemplate(Template):
    """One token a letter, its code point; the assistant's are labelled. A conversation longer than `max_length` is dropped, or cut
    into pieces. A message of the role "broken" cannot be encoded."""

    def __init__(self, max_length: int | None = None, *, pieces: bool = False) -> None:
        self.max_length = max_length
        self.pieces = pieces
        self.batches: list[int] = []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def batch_encode(self, trajectories: Sequence[Any], *, add_generation_prompt: bool = False) -> list[list[Any]]:
        self.batches.append(len(trajectories))
        return [self._one(trajectory, row) for row, trajectory in enumerate(trajectories)]

    def batch_encode_text(self, texts: Sequence[str]) -> list[list[Any]]:
        return [self._cut([ord(letter) for letter in text], [ord(letter) for letter in text]) for text in texts]

    def _one(self, trajectory: Mapping[str, Any], row: int) -> list[Any]:
        ids: list[int] = []
        labels: list[int] = []
        for turn, message in enumerate(trajectory["messages"]):
            if message["role"] == "broken":
                raise TemplateError("the role `broken` cannot be rendered.", row=row, turn=turn)
            letters = [ord(letter) for letter in message["content"]]
            ids += letters
            labels += letters if message["role"] == "assistant" else [-100] * len(letters)
        return self._cut(ids, labels)

    def _cut(self, ids: list[int], labels: list[int]) -> list[Any]:
        size = self.max_length or max(len(ids), 1)
        if len(ids) > size and not self.pieces:
            return []
        return [{"input_ids": ids[at:at + size], "labels": labels[at:at + size]} for at in range(0, len(ids), size)]


@pytest.fixture
def letters() -> type[LetterTemplate]:
    return LetterTemplate


@pytest.fixture
def encoded() -> Callable[..., Dataset]:
    """Makes an encoded dataset of rows in memory."""

    def make(rows: Iterable[Mapping[str, Any]], **options: Any) -> Dataset:
        dataset = Dataset(DatasetMeta(data=list(rows)))
        dataset.set_template(LetterTemplate())
        dataset.encode(**options)
        return dataset

    return make


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes rows as JSON lines and returns the path."""

    def write(rows: Iterable[Any], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write
