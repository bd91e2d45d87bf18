"""Writes the rows of a dataset to one file, whole or not at all."""

import contextlib
import csv
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_core.dataset import table as tables
from twinkle_core.errors import DataError, listing

if TYPE_CHECKING:
    import datasets


def save(part: "datasets.Dataset", path: Path) -> str:
    """Write `part` to `path`, by its ending, and return the path. The file appears when it is complete.

    Raises: `DataError` for an unknown ending, a folder that cannot be written to, or a CSV file of columns that are not text.
    """
    try:
        is_path = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_path = False
    if not is_path:
        raise DataError(f"`save_as({str(path)!r})`: a path cannot hold these characters. Use another name.")
    writer = WRITERS.get(path.suffix.lower())
    if writer is None:
        raise DataError(f"`save_as({str(path)!r})`: the ending says the type. Use one of {listing(WRITERS)}.")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer(part, temporary)
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"`{path}` cannot be written: {error}. What was there before is unchanged.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return str(path)


def _rows(part: "datasets.Dataset") -> Iterator[dict[str, Any]]:
    for start in range(0, len(part), tables.CHUNK_ROWS):
        yield from tables.rows_of(tables.arrow_rows(part, slice(start, start + tables.CHUNK_ROWS)))


def _write_json_lines(part: "datasets.Dataset", path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for row in _rows(part):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _write_json(part: "datasets.Dataset", path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for index, row in enumerate(_rows(part)):
            file.write(("[\n" if index == 0 else ",\n") + json.dumps(row, ensure_ascii=False))
        file.write("\n]\n" if len(part) else "[]\n")


def _write_csv(part: "datasets.Dataset", path: Path) -> None:
    names = tables.visible_columns(part)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for row in _rows(part):
            for name, value in row.items():
                if not isinstance(value, str | int | float | None):
                    raise DataError(f"The column `{name}` holds a {type(value).__name__}, which a CSV file cannot. Save as .jsonl "
                                    "or .parquet.")
            writer.writerow(["" if row[name] is None else row[name] for name in names])


def _write_parquet(part: "datasets.Dataset", path: Path) -> None:
    import pyarrow.parquet as pq

    table = tables.arrow_rows(part, slice(None)).select(tables.visible_columns(part))
    pq.write_table(table.replace_schema_metadata(None), path)


WRITERS: dict[str, Callable[["datasets.Dataset", Path], None]] = {
    ".jsonl": _write_json_lines,
    ".json": _write_json,
    ".csv": _write_csv,
    ".parquet": _write_parquet,
}
