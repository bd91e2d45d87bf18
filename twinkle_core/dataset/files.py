"""Which files of a folder hold the rows that were asked for.

A folder is read by these rules, in this order:

1. A README.md whose front matter lists `configs` (the convention of both hubs) decides: `subset_name` is the `config_name`.
2. Else the data files are those with a known ending in the folder and below it; hidden files are left out, and JSON files that
   describe a repository rather than hold rows. `subset_name` is the name of a folder in their path, or the name of a file.
3. Files whose name, or folder, has the word of a split in it (`train-00000-of-00002.parquet`, `test/a.jsonl`) belong to that
   split; where no file has one, all are "train".
4. Files of several types are an error that lists them, because one is most likely not data.
"""

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from twinkle_core.dataset.readers import READERS
from twinkle_core.errors import DataError, did_you_mean, listing

DEFAULT_SPLIT = "train"

SPLIT_WORDS = {
    "train": "train", "training": "train",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
    "validation": "validation", "valid": "validation", "dev": "validation", "val": "validation",
}
"""Word in a path -> split: the words that the `datasets` library knows."""

NOT_DATA = frozenset({
    "dataset_infos.json", "dataset_info.json", "state.json", "configuration.json", "config.json", "dataset_meta.json",
    "package.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json"})
"""Names of JSON files that describe a repository."""


def data_files(folder: Path, *, subset: str | None, split: str | None) -> list[Path]:
    """Return the files to read, sorted by path.

    Raises: `DataError` if there are none, of several types, or the subset or split does not exist; the text lists what there is.
    """
    configs = _configs(folder)
    found = _from_configs(folder, configs, subset, split) if configs else _from_names(folder, subset, split)
    types = Counter(path.suffix.lower() for path in found)
    if len(types) > 1:
        examples = ", ".join(f"{count} {suffix} (e.g. `{next(p for p in found if p.suffix.lower() == suffix).relative_to(folder)}`)"
                             for suffix, count in sorted(types.items()))
        raise DataError(f"The folder `{folder}` holds data files of several types: {examples}. Name the file, or a folder with one "
                        "type.")
    return found


def _from_names(folder: Path, subset: str | None, split: str | None) -> list[Path]:
    found = sorted(path for path in folder.rglob("*") if _is_data(path, folder))
    if not found:
        there = listing(path.name for path in folder.iterdir())
        raise DataError(f"The folder `{folder}` holds no data file ({listing(READERS)}). It holds: {there}.")
    if subset is not None:
        subsets = {name for path in found for name in _subset_names(path, folder)}
        chosen = [path for path in found if subset in _subset_names(path, folder)]
        if not chosen:
            raise DataError(f"`subset_name={subset!r}` is not a subset of `{folder}`.{did_you_mean(subset, subsets)} There are: "
                            f"{listing(subsets)}.")
        found = chosen
    by_split: dict[str, list[Path]] = {}
    for path in found:
        by_split.setdefault(_split_of(path, folder, subset) or "", []).append(path)
    if set(by_split) == {""}:
        by_split = {DEFAULT_SPLIT: found}
    by_split.pop("", None)
    return _choose_split(by_split, split, folder)


def _choose_split(by_split: dict[str, list[Path]], split: str | None, folder: Path) -> list[Path]:
    wanted = split or DEFAULT_SPLIT
    name = wanted if wanted in by_split else SPLIT_WORDS.get(wanted, wanted)
    if name not in by_split:
        raise DataError(f"`split={wanted!r}` is not a split of `{folder}`.{did_you_mean(wanted, by_split)} There are: "
                        f"{listing(by_split)}.")
    return by_split[name]


def _is_data(path: Path, folder: Path) -> bool:
    parts = path.relative_to(folder).parts
    return (path.suffix.lower() in READERS and path.name not in NOT_DATA and path.is_file()
            and not any(part.startswith((".", "__")) for part in parts))


def _words(part: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", part.lower())


def _split_of(path: Path, folder: Path, subset: str | None) -> str | None:
    """The split that a path names; the file's own name comes before its folders'."""
    relative = path.relative_to(folder)
    for part in (relative.stem, *reversed(relative.parts[:-1])):
        if part != subset:
            for word in _words(part):
                if word in SPLIT_WORDS:
                    return SPLIT_WORDS[word]
    return None


def _subset_names(path: Path, folder: Path) -> set[str]:
    relative = path.relative_to(folder)
    words = [word for word in re.split(r"[-.]", relative.stem) if word]
    names = {*relative.parts[:-1], relative.stem, words[0] if words else relative.stem}
    return {name for name in names if name.lower() not in SPLIT_WORDS and name != "data"}


def _configs(folder: Path) -> list[dict[str, Any]]:
    """What the front matter of README.md says under `configs`."""
    readme = folder / "README.md"
    if not readme.is_file():
        return []
    text = readme.read_text(encoding="utf-8", errors="replace")
    match = re.match(r"\ufeff?---\r?\n(.*?)\r?\n---", text, flags=re.DOTALL)
    if match is None:
        return []
    import yaml

    try:
        header = yaml.safe_load(match[1])
    except yaml.YAMLError:
        return []  # rule 2 then finds the files by their names
    configs = header.get("configs") if isinstance(header, dict) else None
    if not isinstance(configs, list):
        return []
    return [config for config in configs if isinstance(config, dict) and config.get("data_files")]


def _from_configs(folder: Path, configs: Sequence[dict[str, Any]], subset: str | None, split: str | None) -> list[Path]:
    by_name = {str(config.get("config_name", "default")): config for config in configs}
    defaults = [name for name, config in by_name.items() if config.get("default") or name == "default"]
    chosen = subset or (defaults[0] if defaults else next(iter(by_name)) if len(by_name) == 1 else None)
    if chosen not in by_name:
        said = "no `subset_name` was given" if subset is None else f"`subset_name={subset!r}` is not one of them"
        raise DataError(f"`{folder}` has the subsets {listing(by_name)}, and {said}.{did_you_mean(subset or '', by_name)} Choose "
                        "one.")
    files = by_name[chosen]["data_files"]
    entries: Iterable[Any] = [{"split": DEFAULT_SPLIT, "path": files}] if not (
        isinstance(files, list) and all(isinstance(entry, dict) for entry in files)) else files
    by_split: dict[str, list[Path]] = {}
    for entry in entries:
        path = entry.get("path")
        patterns = [path] if isinstance(path, str) else path
        if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
            raise DataError(f"README.md in `{folder}` lists the file {path!r} for subset `{chosen}`. Use a path or a list of "
                            "paths.")
        by_split[str(entry.get("split", DEFAULT_SPLIT))] = _matching(folder, patterns)
    found = _choose_split(by_split, split, folder)
    if not found:
        raise DataError(f"No file in `{folder}` matches what its README.md lists for subset `{chosen}`. Fetch the dataset again.")
    return found


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    every = [path for path in folder.rglob("*") if path.is_file() and path.suffix.lower() in READERS]
    return sorted(path for path in every
                  if any(fnmatch.fnmatch(path.relative_to(folder).as_posix(), pattern.removeprefix("./")) for pattern in patterns))
