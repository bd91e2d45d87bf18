"""Whether a folder holds a whole model or dataset: what an interrupted download or copy leaves out.

Reads names, indices and the headers of safetensors files, never the weights. Knows no hub.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from twinkle_core.hub.interface import Kind

_UNFINISHED = ("*.incomplete", "*.parallel_tmp")
_TEMPORARY_FOLDERS = ("._____temp", ".____temp")  # modelscope before 1.38 downloads into them
_VOCABULARIES = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.json", "vocab.txt")
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_CONFIGS = ("config.json", "adapter_config.json")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<total>\d{5})\.safetensors")


def what_is_missing(folder: Path, *, kind: Kind, patterns: Sequence[str] = ()) -> str:
    """Return why `folder` is not a complete `kind`, or "" if it is.

    With `patterns`, only files that match one of them are looked at, and one must match the first. Without, a model needs a
    configuration and all its weights, and a dataset at least one file.
    """
    names = sorted(_names(folder))
    wanted = [name for name in names if not patterns or _matches(name, patterns)]
    return (_unfinished(names, patterns) or _dangling(folder, wanted)
            or (_missing_patterns(wanted, patterns) if patterns else
                _missing_weights(folder, names) if kind == "model" else _missing_rows(names)))


def _names(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        relative = path.relative_to(folder)
        if not path.is_dir() and ".git" not in relative.parts and ".cache" not in relative.parts:
            yield relative.as_posix()


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _unfinished(names: list[str], patterns: Sequence[str]) -> str:
    for name in names:
        parts = Path(name).parts
        final = "/".join(part for part in parts if part not in _TEMPORARY_FOLDERS)
        final = final.rpartition(".")[0] if _matches(final, _UNFINISHED) else final
        if final != name and (not patterns or _matches(final, patterns)):
            return f"`{name}` is the rest of an interrupted download"
    return ""


def _dangling(folder: Path, names: list[str]) -> str:
    broken = [name for name in names if not (folder / name).exists()]
    return f"`{broken[0]}` is a link to a file that does not exist" if broken else ""


def _missing_patterns(names: list[str], patterns: Sequence[str]) -> str:
    if not any(fnmatch(name, patterns[0]) for name in names):
        return f"no file matches `{patterns[0]}`"
    if "tokenizer_config.json" in names and not any(_matches(name, _VOCABULARIES) for name in names):
        return f"there is no vocabulary (one of {', '.join(f'`{name}`' for name in _VOCABULARIES)})"
    return ""


def _missing_rows(names: list[str]) -> str:
    return "" if any(not name.startswith(".") for name in names) else "it holds no files"


def _missing_weights(folder: Path, names: list[str]) -> str:
    if not names:
        return "it holds no files"
    if not any(name in names for name in _CONFIGS):
        return "there is no `config.json`"
    for index in (name for name in names if name.endswith(".safetensors.index.json") and "/" not in name):
        try:
            shards = set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values())
        except OSError as error:
            return f"`{index}` cannot be read ({error})"
        except (ValueError, KeyError, AttributeError, TypeError):
            return f"`{index}` is damaged"
        absent = sorted(shards - set(names))
        if absent:
            return f"`{index}` names {len(shards)} files, and `{absent[0]}` is not there"
    weights = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    for match in filter(None, map(_SHARD.fullmatch, weights)):
        shards = [f"{match['stem']}-{number:05}-of-{match['total']}.safetensors" for number in range(1, int(match["total"]) + 1)]
        absent = [shard for shard in shards if shard not in weights]
        if absent:
            return f"`{absent[0]}` is not there"
    for name in weights:
        try:
            is_whole = _is_whole_safetensors(folder / name)
        except OSError as error:
            return f"`{name}` cannot be read ({error})"
        if not is_whole:
            return f"`{name}` is cut off"
    return "" if any(_matches(name, _WEIGHTS) for name in names) else "there are no weights (`*.safetensors`)"


def _is_whole_safetensors(path: Path) -> bool:
    """Whether the file is as long as its header says: 8 bytes of header length, the header, the tensors."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 0 < header_bytes <= size_bytes - 8:
            return False
        try:
            header = json.loads(file.read(header_bytes))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            return False
    return size_bytes == 8 + header_bytes + max(ends, default=0)
