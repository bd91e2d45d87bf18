"""`DatasetMeta`: which rows a dataset is made of."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from twinkle_core.errors import ArgumentError, ArgumentTypeError, DataError


@dataclass(frozen=True, eq=False)
class DatasetMeta:
    """Names rows: those of a file, a folder, a hub's dataset, or rows in memory. Two of them are the same if they are one object.

    Attributes:
        dataset_id: path of a file (jsonl, json, csv, tsv, parquet) or folder, or a hub id: "ms://org/name", "hf://org/name",
            "tiny://name".
        subset_name: for a dataset that has several, e.g. "main".
        split: which split to read. None: "train".
        data_slice: the rows to take: `range(16)`, `slice(0, 16)`, a list of row numbers, or a count from the start. A range, list
            or count must lie within the rows there are; a slice takes at most what there is.
        data: rows in memory, as dicts, or a `datasets.Dataset`; instead of `dataset_id`.
    """

    dataset_id: str | None = None
    subset_name: str | None = None
    split: str | None = None
    data_slice: range | slice | list[int] | int | None = None
    data: Any = None

    def __post_init__(self) -> None:
        if (self.dataset_id is None) == (self.data is None):
            both = "both" if self.data is not None else "neither"
            raise ArgumentError(f"`DatasetMeta` was given {both} `dataset_id` and `data`. Say exactly one: where the rows are, or "
                                "the rows.")
        if self.data is not None and (self.subset_name or self.split):
            raise ArgumentError("`DatasetMeta(data=...)` has no subsets and splits. Leave `subset_name` and `split` out.")
        if self.dataset_id is not None and not isinstance(self.dataset_id, str):
            if not hasattr(self.dataset_id, "__fspath__"):
                raise ArgumentTypeError(f"`dataset_id` is a {type(self.dataset_id).__name__}. Use a path or hub id as text; rows "
                                        "in memory go to `data`.")
            object.__setattr__(self, "dataset_id", str(self.dataset_id))
        if isinstance(self.data, str | bytes | Mapping) or (self.data is not None and not isinstance(self.data, Iterable)):
            raise ArgumentTypeError(f"`DatasetMeta(data=)` got a {type(self.data).__name__}. Pass a list of dicts, one a row.")
        for name in ("subset_name", "split"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ArgumentTypeError(f"`DatasetMeta({name}={value!r})`: use a name as text, or leave it out.")
        if isinstance(self.data_slice, bool) or not isinstance(self.data_slice, range | slice | list | int | None):
            raise ArgumentTypeError(f"`data_slice={self.data_slice!r}` is a {type(self.data_slice).__name__}. Use a range, a "
                                    "slice, a list of row numbers, or a count.")

    def __str__(self) -> str:
        subset = f" subset {self.subset_name}" if self.subset_name else ""
        return f"{self.dataset_id or 'rows in memory'}{subset}{f' split {self.split}' if self.split else ''}"

    def positions(self, length: int) -> range | list[int]:
        """Return which of `length` rows `data_slice` takes. Raises: `DataError` if a row does not exist."""
        wanted = self.data_slice
        if wanted is None:
            return range(length)
        if isinstance(wanted, slice):
            return range(length)[wanted]
        if isinstance(wanted, int):
            wanted = range(wanted)
        outside = list(itertools.islice((index for index in wanted if type(index) is not int or not -length <= index < length), 1))
        if outside or not wanted:
            what = f"row {outside[0]!r}" if outside else "no row at all"
            raise DataError(f"`data_slice={self.data_slice!r}` asks for {what}, but {self} has {length} rows. Use rows 0 to "
                            f"{length - 1}, or a slice, which takes at most what there is.")
        return [index % length for index in wanted]
