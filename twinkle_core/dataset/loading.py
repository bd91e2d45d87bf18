"""From a `DatasetMeta` to its rows in memory. Nothing is cached on disk, so nothing can be stale."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from twinkle_core.dataset import table as tables
from twinkle_core.dataset.files import DEFAULT_SPLIT, SPLIT_WORDS, data_files
from twinkle_core.dataset.meta import DatasetMeta
from twinkle_core.dataset.readers import Row, read_file, read_memory
from twinkle_core.errors import DataError
from twinkle_core.hub import resolve_dataset

if TYPE_CHECKING:
    import datasets


def load(meta: DatasetMeta) -> "datasets.Dataset":
    """Return the rows that `meta` names.

    Raises: `HubError` if the dataset cannot be found; `DataError` naming file and line for what cannot be read.
    """
    tables.import_datasets()
    if meta.data is not None:
        part = _part_of(read_memory(meta.data))
        if part is None:
            raise DataError("`DatasetMeta(data=...)` holds no rows. Pass at least one.")
    else:
        files, root = _files(meta)
        part = _part_of(row for path in files for row in read_file(path, name=_name(path, root)))
        assert part is not None, "read_file raises for a file without rows"
    return part if meta.data_slice is None else tables.select(part, meta.positions(len(part)))


def _files(meta: DatasetMeta) -> tuple[list[Path], Path | None]:
    assert meta.dataset_id is not None, "checked by DatasetMeta"
    location = resolve_dataset(meta.dataset_id)
    if location.is_dir():
        return data_files(location, subset=meta.subset_name, split=meta.split), location
    if meta.subset_name is not None:
        raise DataError(f"`subset_name={meta.subset_name!r}`: `{location}` is a single file and has no subsets. Leave it out.")
    if meta.split not in (None, DEFAULT_SPLIT) and SPLIT_WORDS.get(meta.split or "", meta.split) not in location.stem:
        raise DataError(f"`split={meta.split!r}`: `{location}` is a single file and has no splits. Leave `split` out, or use "
                        "`Dataset.split` to hold rows out.")
    return [location], None


def _name(path: Path, root: Path | None) -> str:
    """What to call a file in errors: short, but enough to find it."""
    return str(path) if root is None else str(Path(root.name) / path.relative_to(root))


def _part_of(rows: Iterable[Row]) -> "datasets.Dataset | None":
    found = [tables.table_of([row for row, _ in chunk], [where for _, where in chunk]) for chunk in tables.chunks(rows)]
    return tables.dataset_of(tables.join(found)) if found else None
