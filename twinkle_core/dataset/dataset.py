"""`Dataset`: the rows of a run, from where they lie to tokens.

A dataset is a list of parts, one for each `DatasetMeta`, that behave as one dataset, the first part's rows first, until
`mix_dataset` weaves them into one part. Rows live in Arrow tables of the `datasets` library, in memory; no step reads or writes
the library's cache. What a layout means is left to `layouts`, what becomes of a bad row to `bad_rows`, batching and epochs to
the `DataLoader`.
"""

import bisect
import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_core import registry, session
from twinkle_core.dataset import table as tables
from twinkle_core.dataset.bad_rows import OnBadRow, Place, Tally, check_policy, each_row, say
from twinkle_core.dataset.encoding import Encoder
from twinkle_core.dataset.layouts import Layout, find_layout
from twinkle_core.dataset.loading import load
from twinkle_core.dataset.meta import DatasetMeta
from twinkle_core.dataset.mixing import StoppingStrategy, mix, split_positions
from twinkle_core.dataset.pool import over_batches
from twinkle_core.dataset.saving import save
from twinkle_core.errors import ArgumentError, ArgumentTypeError, DataError, ModeError
from twinkle_core.mesh import DeviceMesh
from twinkle_core.preprocessor.builtin import FunctionPreprocessor
from twinkle_core.remote import RemoteComponent, remote_function

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa


class Dataset(RemoteComponent):
    """Rows from files, memory or a hub. `dataset[3]` is a row as a dict; after `encode()`, its tokens."""

    stays_with_script = True

    def __init__(
        self,
        dataset_meta: DatasetMeta | str | os.PathLike[str] | None = None,
        remote_group: str | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        """Read the rows.

        Args:
            dataset_meta: which rows; a path or hub id is short for `DatasetMeta(text)`. None: none yet, see `add_dataset`.
            remote_group: where the dataset lives; None: in this process.
            device_mesh: arrangement of that group's ranks.

        Raises: `HubError` if the dataset cannot be found; `DataError` naming file and line for what cannot be read.
        """
        self._metas: list[DatasetMeta | None] = []
        self._parts: list[datasets.Dataset] = []
        self._template: Any = None
        self._is_encoded = False
        self._layouts_said: set[str] = set()
        if dataset_meta is not None:
            self.add_dataset(dataset_meta)

    @remote_function(lazy_collect=False)
    def set_template(self, template: Any, **options: Any) -> None:
        """Set the template that `encode` uses: a class, an instance or a registered name; `options` go to its constructor."""
        self._template = registry.resolve_argument("templates", template, argument="set_template", options=options)

    @remote_function(lazy_collect=False)
    def add_dataset(self, dataset_meta: DatasetMeta | str | os.PathLike[str]) -> None:
        """Add rows after those there are. Raises: as the constructor; `ModeError` after `encode`."""
        if isinstance(dataset_meta, str | os.PathLike):
            dataset_meta = DatasetMeta(str(dataset_meta))
        if not isinstance(dataset_meta, DatasetMeta):
            raise ArgumentTypeError(f"`dataset_meta` is a {type(dataset_meta).__name__}. Pass a `DatasetMeta`, a path or a hub id.")
        self._check_not_encoded("add_dataset")
        self._parts.append(load(dataset_meta))
        self._metas.append(dataset_meta)

    @remote_function(lazy_collect=False)
    def map(
        self,
        preprocessor: Any,
        *,
        dataset_meta: DatasetMeta | None = None,
        num_proc: int | None = None,
        on_bad_row: OnBadRow = "raise",
        **options: Any,
    ) -> None:
        """Replace every row by what a preprocessor makes of it.

        Args:
            preprocessor: a class, an instance, a registered name, or a function from a row to a row or conversation.
            dataset_meta: only the rows that came with this one; None: all.
            num_proc: processes to use; None: this one.
            on_bad_row: "raise" stops at a row that raises; "skip" leaves it out and says how many and why.
            options: arguments of a preprocessor's class.

        Raises: `DataError` naming row, file and line, or if no row is left; `ModeError` after `encode`.
        """
        check_policy(on_bad_row, where="map")
        self._check_not_encoded("map")
        function = registry.resolve_argument(
            "preprocessors", preprocessor, argument="map", options=options, function=FunctionPreprocessor,
            own=("dataset_meta", "num_proc", "on_bad_row"))
        name = getattr(function, "name", type(function).__name__)
        chosen = self._chosen("map", dataset_meta)
        self._transform(_Mapper(function, name, on_bad_row), chosen, num_proc=num_proc, what=f"map({name})")

    @remote_function(lazy_collect=False)
    def filter(self, function: Callable[[dict[str, Any]], Any], *, dataset_meta: DatasetMeta | None = None) -> None:
        """Keep the rows for which `function(row)` is true; before or after `encode`.

        Raises: `DataError` naming the row for which the function raises.
        """
        if not callable(function):
            raise ArgumentTypeError(f"`filter` got a {type(function).__name__}. Pass a function from a row to a truth value.")
        chosen, parts, first_row = self._chosen("filter", dataset_meta), list(self._parts), 0
        for index, part in enumerate(self._parts):
            if index in chosen:
                kept: list[int] = []
                for rows, origins, start in _batches(part):
                    place = Place(first_row + start, origins)
                    verdicts, _ = each_row(rows, function, place, Tally(), on_bad_row="raise", doing="`filter`")
                    kept += [start + position for position, is_kept in enumerate(verdicts) if is_kept]
                parts[index] = tables.select(part, kept)
            first_row += len(part)
        self._parts = parts

    @remote_function(lazy_collect=False)
    def encode(
        self, *, add_generation_prompt: bool = False, num_proc: int | None = None, on_bad_row: OnBadRow = "raise",
    ) -> None:
        """Turn rows into `input_ids` and `labels` (and `user_data`, where rows have it). The layout is recognised and said.

        Args:
            add_generation_prompt: encode prompts for a sampler: a last assistant message is dropped.
            num_proc: processes to use; None: this one.
            on_bad_row: "raise" stops at a row that cannot be encoded; "skip" leaves it out and says how many and why.

        Raises:
            ModeError: called twice, or before `set_template`.
            DataError: the layout is unknown; a row cannot be encoded; truncation drops every row.
        """
        check_policy(on_bad_row, where="encode")
        self._check_not_encoded("encode")
        if self._template is None:
            raise ModeError("`encode` needs a template. Call `dataset.set_template(\"Template\", model_id=...)` first, or name the "
                            "template of the model's family.")
        layouts = self._recognise("encode")
        if len({layout.name == "chosen/rejected" for layout in layouts}) > 1 and not add_generation_prompt:
            raise DataError("Some of the rows are preference pairs (chosen/rejected) and some are not. Put them into two datasets.")
        encoders = [Encoder(self._template, layout, add_generation_prompt=add_generation_prompt, on_bad_row=on_bad_row)
                    for layout in layouts]
        self._transform(encoders, range(len(self._parts)), num_proc=num_proc, what="encode")
        self._is_encoded = True

    @remote_function(lazy_collect=False)
    def mix_dataset(
        self,
        *,
        interleave: bool = True,
        probabilities: Sequence[float] | None = None,
        stopping_strategy: StoppingStrategy = "all_exhausted_without_replacement",
        seed: int | None = None,
    ) -> None:
        """Weave the parts that `add_dataset` added into one; before or after `encode`.

        Args:
            interleave: take rows from the parts in turn; False: the first part's rows, then the second's.
            probabilities: draw the part of the next row with these instead, one number a part, with the sum 1.
            stopping_strategy: "all_exhausted_without_replacement" uses every row once; "first_exhausted" stops when a part is used
                up; "all_exhausted" starts short parts again until the longest is used up.
            seed: of the draws; None: the session's.
        """
        self._require_rows("mix_dataset")
        seed = session.current().seed if seed is None else seed
        self._parts = [mix(self._parts, interleave=interleave, probabilities=probabilities, strategy=stopping_strategy, seed=seed)]
        self._metas = [None]

    @remote_function(execute="first")
    def split(self, test_size: float | int, seed: int | None = None) -> tuple["Dataset", "Dataset"]:
        """Return (train, test): two datasets that share no row. This one stays as it is.

        Args:
            test_size: rows of the second, as a fraction between 0 and 1 or as a count. Which, is drawn; the order stays.
            seed: of the draw; None: the session's.
        """
        self._require_rows("split")
        whole = mix(self._parts, interleave=False)
        train, test = split_positions(len(whole), test_size, session.current().seed if seed is None else seed)
        return self._with_part(tables.select(whole, train)), self._with_part(tables.select(whole, test))

    @remote_function(lazy_collect=False)
    def __len__(self) -> int:
        """The number of rows."""
        return sum(len(part) for part in self._parts)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rows, fetching many at a time."""
        for start in range(0, len(self), tables.CHUNK_ROWS):
            yield from self[start:start + tables.CHUNK_ROWS]

    @remote_function(execute="first")
    def __getitem__(self, key: int | slice) -> Any:
        """Return a row as a dict, or a list of them for a slice. Preference rows have `chosen` and `rejected`."""
        if isinstance(key, slice):
            return self._rows_at(list(range(len(self))[key]))
        try:
            position = range(len(self))[key]
        except IndexError as error:
            raise IndexError(f"Row {key} does not exist: the dataset has {len(self)} rows.") from error
        except TypeError as error:
            raise ArgumentTypeError(f"`dataset[{key!r}]`: use a row number or a slice.") from error
        return self._rows_at([position])[0]

    @remote_function(execute="first")
    def examples_at(self, positions: Sequence[int]) -> list[dict[str, Any]]:
        """Return what the rows at `positions` are trained on: encoded rows, or else conversations of the recognised layout.

        Raises: `DataError` if the rows are preference pairs or text that are not encoded, or cannot be read.
        """
        rows = self._rows_at(positions)
        if self._is_encoded:
            return rows
        bounds, layouts = self._bounds(), self._recognise("DataLoader")
        for layout in layouts:
            if layout.name in ("chosen/rejected", "text"):
                raise DataError(f"Rows of the layout {layout.name} can only be used as tokens. Call `dataset.encode()` first.")
        return [_conversation(layouts[_part_at(bounds, position)], row, position)
                for position, row in zip(positions, rows, strict=True)]

    @remote_function(execute="first", lazy_collect=False)
    def save_as(self, path: str) -> str:
        """Write the rows to a file (.jsonl, .json, .csv, .parquet), whole or not at all, and return its path."""
        self._require_rows("save_as")
        return save(mix(self._parts, interleave=False), Path(path))

    def __repr__(self) -> str:
        columns = ", ".join(dict.fromkeys(name for part in self._parts for name in tables.visible_columns(part)))
        return f"Dataset({len(self)} rows{', encoded' if self._is_encoded else ''}: {columns or 'no columns'})"

    def _transform(self, functions: Any, chosen: Sequence[int], *, num_proc: int | None, what: str) -> None:
        """Replace the chosen parts by what the functions make of their batches, all of them or, on an error, none."""
        parts, tally, first_row = list(self._parts), Tally(), 0
        for index, part in enumerate(self._parts):
            if index in chosen and len(part):
                function = functions[index] if isinstance(functions, list) else functions
                results: list[pa.Table] = []
                for result, counts in over_batches(part, function, num_proc=num_proc, first_row=first_row):
                    results.append(result)
                    tally.add(counts)
                parts[index] = tables.dataset_of(tables.join(results))
            first_row += len(part)
        tally.report(what)
        self._parts = parts

    def _recognise(self, where: str) -> list[Layout]:
        """The layout of each part; said once."""
        self._require_rows(where)
        layouts = [find_layout(tables.visible_columns(part)) for part in self._parts]
        for layout, part in zip(layouts, self._parts, strict=True):
            if layout.name not in self._layouts_said:
                self._layouts_said.add(layout.name)
                columns = tables.visible_columns(part)
                used = ", ".join(name for name in columns if name in layout.columns)
                unused = ", ".join(name for name in columns if name not in layout.columns)
                if unused or layout.name != "messages":  # where nothing is guessed, nothing is said
                    say(f"rows are read as the layout {layout.name} (columns {used}{f'; left out: {unused}' if unused else ''})")
        return layouts

    def _chosen(self, where: str, meta: DatasetMeta | None) -> Sequence[int]:
        self._require_rows(where)
        if meta is None:
            return range(len(self._parts))
        chosen = [index for index, known in enumerate(self._metas) if known is meta]
        if not chosen:
            raise ArgumentError(f"`{where}(dataset_meta=...)`: {meta} was not added to this "
                                f"dataset{' or is mixed already' if None in self._metas else ''}. "
                                "Pass the object that `add_dataset` got.")
        return chosen

    def _rows_at(self, positions: Sequence[int]) -> list[dict[str, Any]]:
        bounds = self._bounds()
        by_part: dict[int, list[int]] = {}
        for position in positions:
            part = _part_at(bounds, position)
            by_part.setdefault(part, []).append(position - bounds[part])
        found = {part: iter(tables.rows_of(tables.arrow_rows(self._parts[part], local))) for part, local in by_part.items()}
        rows = [next(found[_part_at(bounds, position)]) for position in positions]
        if self._is_encoded:
            for row in rows:
                if row.get("user_data", row) is None:
                    del row["user_data"]
        return rows

    def _bounds(self) -> list[int]:
        """The number of the first row of each part."""
        bounds, total = [], 0
        for part in self._parts:
            bounds.append(total)
            total += len(part)
        return bounds

    def _with_part(self, part: "datasets.Dataset") -> "Dataset":
        other = copy.copy(self)
        other._parts, other._metas, other._layouts_said = [part], [None], set(self._layouts_said)
        return other

    def _require_rows(self, where: str) -> None:
        if not self._parts:
            raise ModeError(f"`{where}` needs rows, and this dataset has none. Call `dataset.add_dataset(DatasetMeta(...))` first.")

    def _check_not_encoded(self, where: str) -> None:
        if self._is_encoded:
            raise ModeError(f"`{where}` works on rows, and this dataset is encoded already. Call it before `encode`, which is "
                            "called once.")


class _Mapper:
    """Applies a preprocessor to batches; an object, so that it can travel to other processes."""

    def __init__(self, function: Callable[[Mapping[str, Any]], Any], name: str, on_bad_row: OnBadRow) -> None:
        self.function = function
        self.name = name
        self.on_bad_row: OnBadRow = on_bad_row

    def __call__(self, batch: "pa.Table", first_row: int) -> tuple["pa.Table", Tally]:
        origins, tally = tables.origins_of(batch), Tally(seen=batch.num_rows)
        results, kept = each_row(tables.rows_of(batch), self._apply, Place(first_row, origins), tally, on_bad_row=self.on_bad_row,
                                 doing=f"`{self.name}`")
        return tables.table_of(results, None if origins is None else [origins[index] for index in kept]), tally

    def _apply(self, row: Mapping[str, Any]) -> dict[str, Any]:
        result = self.function(row)
        if not isinstance(result, Mapping) or not result:
            raise DataError(f"`{self.name}` returned {result!r}. A preprocessor returns a dict with at least one key.")
        return dict(result)


def _batches(part: "datasets.Dataset") -> Any:
    for start in range(0, len(part), tables.CHUNK_ROWS):
        batch = tables.arrow_rows(part, slice(start, start + tables.CHUNK_ROWS))
        yield tables.rows_of(batch), tables.origins_of(batch), start


def _part_at(bounds: Sequence[int], position: int) -> int:
    return bisect.bisect_right(bounds, position) - 1


def _conversation(layout: Layout, row: Mapping[str, Any], position: int) -> dict[str, Any]:
    try:
        return dict(layout.example(row))
    except DataError as error:
        raise DataError(f"Row {position}: {error}") from error
