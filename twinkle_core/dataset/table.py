"""Rows as Arrow tables and back, without loss: what lies between Python dicts and the `datasets` library.

A column of text, booleans, integers or floats is stored as such. Every other column - lists, dicts, or values of several types,
e.g. tool calls whose arguments differ from row to row - is stored as JSON text (Arrow's JSON type, `datasets.Json`), so Arrow
never invents keys filled with null. A key that a row lacks reads back as None at the top level of the row, and only there.

A hidden column holds where each row came from ("chats.jsonl:17"); it follows the row through selections and mixtures.
"""

import itertools
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from twinkle_core.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

ORIGIN = "__origin__"
"""The hidden column."""

CHUNK_ROWS = 1000
"""Rows that are turned into Arrow at once: large enough that the overhead of a call vanishes, small in memory."""


def import_datasets() -> Any:
    """Return the module `datasets`. Raises: `MissingExtraError`."""
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(
            "Datasets need the `datasets` library, which is not installed. Run: pip install 'twinkle-core[data]'") from error
    return datasets


def table_of(rows: Sequence[Mapping[str, Any]], origins: Sequence[str] | None = None) -> "pa.Table":
    """Return a table with one column for each key in `rows`, in the order of first appearance.

    Raises: `DataError` naming row and column where a value can be stored neither as such nor as JSON.
    """
    import pyarrow as pa

    names = dict.fromkeys(itertools.chain.from_iterable(rows))
    columns: dict[str, pa.Array | pa.ChunkedArray] = {}
    for name in names:
        if not isinstance(name, str):
            raise DataError(f"A row has the key {name!r} of type {type(name).__name__}. Keys of a row are text.")
        values = [row.get(name) for row in rows]
        try:
            columns[name] = column_of(values)
        except (TypeError, ValueError, RecursionError) as error:
            raise _explain(name, values, origins, error) from error
    if origins is not None:
        columns[ORIGIN] = pa.array(origins, pa.string())
    return pa.table(columns)


def column_of(values: list[Any]) -> Any:
    """Return an Arrow array of `values`: typed if they are all of one scalar type, else JSON."""
    import pyarrow as pa

    kinds = set(map(type, values)) - {type(None)}
    if not kinds:
        return pa.nulls(len(values))
    kind = kinds.pop()
    arrow_type = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}.get(kind)
    if arrow_type is not None and not kinds:
        try:
            return pa.array(values, arrow_type)
        except OverflowError:
            pass  # an integer beyond 64 bits: JSON holds it
    return json_column(values)


def json_column(values: Iterable[Any]) -> Any:
    """Return an Arrow array of type JSON."""
    import pyarrow as pa

    texts = pa.array([None if value is None else to_json(value) for value in values], pa.string())
    chunks = texts.chunks if isinstance(texts, pa.ChunkedArray) else [texts]
    return pa.chunked_array([pa.ExtensionArray.from_storage(pa.json_(), chunk) for chunk in chunks], type=pa.json_())


def to_json(value: Any) -> str:
    """Return `value` as JSON text; dates, decimals and the like become text, numpy's arrays and scalars lists and numbers."""
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError("bytes are not text")
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if type(value).__module__.split(".")[0] in ("datetime", "decimal", "uuid", "pathlib"):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"a {type(value).__name__} is neither text, number, list nor dict")


def _explain(name: str, values: list[Any], origins: Sequence[str] | None, error: Exception) -> DataError:
    for index, value in enumerate(values):
        try:
            column_of([value])
        except (TypeError, ValueError, RecursionError) as reason:
            where = origins[index] if origins is not None else f"row {index}"
            return DataError(f"The column `{name}` of {where} cannot be stored: {reason}. Remove the column, or make it text, "
                             "numbers, lists and dicts.")
    return DataError(f"The column `{name}` cannot be stored: {error}. Give its values the same type in every row, or remove it.")


def join(tables: Sequence["pa.Table"]) -> "pa.Table":
    """Return the rows of all tables, in order. Where the types of a column differ, it becomes JSON (None stays None)."""
    import pyarrow as pa

    schema: dict[str, pa.DataType] = {}
    for table in tables:
        for field in table.schema:
            known = schema.get(field.name, pa.null())
            schema[field.name] = _common(known, field.type)
    return pa.concat_tables([_cast(table, schema) for table in tables])


def _common(left: Any, right: Any) -> Any:
    import pyarrow as pa

    if left == right or pa.types.is_null(right):
        return left
    return right if pa.types.is_null(left) else pa.json_()


def _cast(table: "pa.Table", schema: Mapping[str, Any]) -> "pa.Table":
    import pyarrow as pa

    columns: dict[str, Any] = {}
    for name, arrow_type in schema.items():
        if name not in table.column_names:
            columns[name] = pa.nulls(table.num_rows, arrow_type)
        elif table.schema.field(name).type == arrow_type:
            columns[name] = table.column(name)
        elif isinstance(arrow_type, pa.JsonType):
            columns[name] = json_column(table.column(name).to_pylist())
        else:
            columns[name] = pa.nulls(table.num_rows, arrow_type)  # it was all null, without a type
    return pa.table(columns)


def dataset_of(table: "pa.Table") -> "datasets.Dataset":
    """Return `table` as a dataset in memory that gives its rows as tables (see `arrow_rows`).

    The library's cache on disk is not involved, so it cannot be stale; nor is its fingerprint, which would hash the whole table.
    """
    return as_part(import_datasets().Dataset(table, fingerprint=uuid.uuid4().hex))


def as_part(dataset: "datasets.Dataset") -> "datasets.Dataset":
    """Return `dataset` in the form in which this package holds datasets: rows are given as Arrow."""
    return dataset.with_format("arrow")


def select(part: "datasets.Dataset", positions: Iterable[int]) -> "datasets.Dataset":
    """Return the rows of `part` at `positions`, in that order."""
    return part.select(positions, new_fingerprint=uuid.uuid4().hex)


def arrow_rows(part: "datasets.Dataset", key: Any) -> "pa.Table":
    """Return the rows of `part` at `key` (a slice, a range or a list of positions) as a table."""
    assert part.format["type"] == "arrow", "every part comes from `as_part`"
    return cast("pa.Table", part[key])


def rows_of(table: "pa.Table") -> list[dict[str, Any]]:
    """Return the rows as dicts, JSON decoded, without the hidden column."""
    names = [name for name in table.column_names if name != ORIGIN]
    if not names:
        return [{} for _ in range(table.num_rows)]
    columns = [values_of(table.column(name)) for name in names]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def values_of(column: "pa.ChunkedArray") -> list[Any]:
    """Return the values of a column, JSON decoded."""
    import pyarrow as pa

    if not isinstance(column.type, pa.JsonType):
        return column.to_pylist()
    texts = itertools.chain.from_iterable(chunk.storage.to_pylist() for chunk in column.chunks)
    return json.loads(f"[{','.join('null' if text is None else text for text in texts)}]")


def origins_of(table: "pa.Table") -> list[str] | None:
    """Return where each row came from, where that is known."""
    return table.column(ORIGIN).to_pylist() if ORIGIN in table.column_names else None


def visible_columns(part: "datasets.Dataset") -> list[str]:
    """Return the names of the columns that a user sees."""
    return [name for name in part.column_names if name != ORIGIN]


def without_null_keys(value: Any) -> Any:
    """Return `value`, which Arrow made of structs, without the keys that Arrow filled with null."""
    if isinstance(value, dict):
        return {key: without_null_keys(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_null_keys(item) for item in value]
    return value


def chunks(rows: Iterable[Any]) -> Iterator[list[Any]]:
    """Return lists of at most `CHUNK_ROWS` rows."""
    source = iter(rows)
    while chunk := list(itertools.islice(source, CHUNK_ROWS)):
        yield chunk
