"""Reads the rows of data files: JSON lines, JSON, CSV, TSV and Parquet, each row with the file and line it stands in.

What cannot be read is a `DataError` that names file and line. Values are what the file says: "NA" in a CSV file is text, and so
is every other cell. A UTF-8 byte order mark and CRLF line ends are accepted.
"""

import codecs
import csv
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from twinkle_core.dataset.table import without_null_keys
from twinkle_core.errors import DataError, listing

Row = tuple[dict[str, Any], str]
"""A row and where it stands."""


def read_file(path: Path, *, name: str | None = None) -> Iterator[Row]:
    """Yield the rows of a data file. `name` stands for the file in origins and errors.

    Raises: `DataError` if the file is of an unknown type, empty, cannot be read, or holds something that is not a row.
    """
    name = name or str(path)
    if path.exists() and not path.is_file():
        raise DataError(f"`{name}` is not a file but a device, pipe or socket. Copy what it gives into a file.")
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"`{name}` is not a data file that can be read. Types: {listing(READERS)}.")
    has_rows = False
    try:
        for row in reader(path, name):
            has_rows = True
            yield row
    except OSError as error:
        raise DataError(f"`{name}` cannot be read: {error}. Check the path and its permissions.") from error
    if not has_rows:
        what = "is empty" if path.stat().st_size == 0 else "holds no rows"
        raise DataError(f"`{name}` {what}. Remove the file, or put at least one row into it.")


def _read_json_lines(path: Path, name: str) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            line = line.strip()
            if line:
                where = f"{name}:{number}"
                yield _checked_row(_parse(_decode(line, where), where), where), where


def _read_json(path: Path, name: str) -> Iterator[Row]:
    """An array of objects, or, under the same ending, JSON lines."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
        while not start and (more := file.read(4096)):
            start = more.lstrip()
    if start.startswith(b"["):
        text = _decode(path.read_bytes().removeprefix(codecs.BOM_UTF8), name)
        for number, row in enumerate(_parse(text, name)):
            where = f"{name}[{number}]"
            yield _checked_row(row, where), where
    elif start:
        try:
            yield from _read_json_lines(path, name)
        except DataError as error:
            raise DataError(f"{error} A .json file holds an array of objects, or one object a line.") from error


def _read_csv(path: Path, name: str, delimiter: str = ",") -> Iterator[Row]:
    text = _decode(path.read_bytes().removeprefix(codecs.BOM_UTF8), name)
    limit = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the limit of the process, 128 KiB by default; set back below
    try:
        rows = list(_csv_rows(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True), name))
    finally:
        csv.field_size_limit(limit)
    yield from rows


def _csv_rows(reader: Any, name: str) -> Iterator[Row]:
    try:
        columns = next(reader, None)
        if columns is None:
            return
        if len(set(columns)) != len(columns) or "" in columns:
            raise DataError(f"The header of `{name}` is {columns}. Give every column a name of its own.")
        begin = reader.line_num + 1
        for cells in reader:
            where, begin = f"{name}:{begin}", reader.line_num + 1
            if not cells:
                continue
            if len(cells) != len(columns):
                raise DataError(f"{where} has {len(cells)} cells, but the header names {len(columns)} columns: {columns}. Quote "
                                "cells that hold the separator, a quote or a line break.")
            yield dict(zip(columns, cells, strict=True)), where
    except csv.Error as error:
        raise DataError(f"{name}:{reader.line_num} is not valid CSV: {error}. Quote cells that hold the separator, a quote or a "
                        "line break.") from error


def _read_tsv(path: Path, name: str) -> Iterator[Row]:
    return _read_csv(path, name, delimiter="\t")


def _read_parquet(path: Path, name: str) -> Iterator[Row]:
    if path.stat().st_size == 0:
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1000):
                for row in _plain_rows(pa.Table.from_batches([batch])):
                    yield row, f"{name} row {number}"
                    number += 1
    except pa.ArrowException as error:
        raise DataError(f"`{name}` is not a Parquet file that can be read: {error}. Write it again.") from error


def _plain_rows(table: Any) -> Iterator[dict[str, Any]]:
    """Rows of an Arrow table. Null keys of structs, which Arrow makes where rows differ in shape, are dropped. JSON stays."""
    import pyarrow as pa

    from twinkle_core.dataset.table import values_of

    names = table.column_names
    columns = [
        values_of(column) if isinstance(column.type, pa.JsonType) else
        [without_null_keys(value) for value in column.to_pylist()] if pa.types.is_nested(column.type) else column.to_pylist()
        for column in table.columns]
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


def read_memory(data: Any) -> Iterator[Row]:
    """Yield rows in memory: dicts, or the rows of a `datasets.Dataset`. Raises: `DataError` naming a row that is not a dict."""
    if hasattr(data, "with_format") and hasattr(data, "column_names") and hasattr(data, "iter"):
        number = 0
        for table in data.with_format("arrow").iter(1000):
            for row in _plain_rows(table):
                yield row, f"data[{number}]"
                number += 1
        return
    for number, row in enumerate(data):
        yield _checked_row(row, f"data[{number}]"), f"data[{number}]"


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is {data[error.start]:#04x}"
        raise DataError(f"{where} is not UTF-8 text: {byte}. Convert the file to UTF-8.") from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        line = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) and error.lineno > 1 else ""
        shown = text.strip()[:80]
        raise DataError(f"{where}{line} is not valid JSON: {error}. It begins: {shown!r}. Correct it, or remove "
                        "it from the file.") from error


def _checked_row(row: Any, where: str) -> dict[str, Any]:
    if isinstance(row, dict):
        return row
    if hasattr(row, "keys") and hasattr(row, "__getitem__"):
        return {key: row[key] for key in row.keys()}  # noqa: SIM118  a mapping that is not a dict
    raise DataError(f"{where} is a {type(row).__name__}, not a row: {str(row)[:80]!r}. A row is an object (dict) whose keys are "
                    "the columns.")


READERS: dict[str, Callable[[Path, str], Iterator[Row]]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
}
