"""`checkpoint.json`: what a checkpoint holds, and whether all of it is there.

It is written last, so a folder without it is not a complete checkpoint. Sizes are compared when folders are listed; checksums
(CRC-32, about 1 GB/s on one core, against disk faults and not against malice) when something is loaded.
"""

import json
import time
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from twinkle_core import __version__
from twinkle_core.errors import CheckpointError

FILE_NAME = "checkpoint.json"
FORMAT_VERSION = 1
_CHUNK_BYTES = 1 << 20

Kind = Literal["full", "adapter", "merged"]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What `checkpoint.json` says.

    Attributes:
        kind: "full" model, "adapter" only, or a model with the adapter "merged" into it.
        step: optimizer steps taken.
        adapter_name: of the adapter; "" for a full model.
        has_training_state: whether `resume_from_checkpoint` finds what it needs.
        identity: what the weights belong to, as `twinkle_core.model.identity` makes it.
        template: name and options of the chat template that the model was trained with; {} where it had none, or a class that no
            plugin registers.
        files: path inside the folder -> [size in bytes, CRC-32].
        saved_at: seconds since 1970, UTC.
        twinkle_version: that wrote it.
        format_version: of this file.
    """

    kind: Kind
    step: int
    adapter_name: str = ""
    has_training_state: bool = False
    identity: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    template: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    files: dict[str, list[int]] = field(default_factory=lambda: dict[str, list[int]]())
    saved_at: float = field(default_factory=time.time)
    twinkle_version: str = __version__
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """Return the text of the file."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raises: `CheckpointError` if it is missing, unreadable or of a later format."""
    path = folder / FILE_NAME
    try:
        values = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"`{folder}` has no `{FILE_NAME}`, so it is not a complete Twinkle checkpoint. Pass the folder that "
                              "`save` returned, or the folder that holds several of them.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"`{path}` cannot be read: {error}. The checkpoint is damaged; use another one.") from error
    if not isinstance(values, dict) or type(values.get("format_version")) is not int:
        raise CheckpointError(f"`{path}` is not a Twinkle checkpoint's. Use another folder.")
    if values["format_version"] > FORMAT_VERSION:
        raise CheckpointError(f"`{folder}` was saved by Twinkle {values.get('twinkle_version')} in format "
                              f"{values['format_version']}; this version reads up to format {FORMAT_VERSION}. "
                              "Run: pip install --upgrade twinkle-core")
    known = {entry.name for entry in fields(Manifest)}
    try:
        manifest = Manifest(**{name: value for name, value in values.items() if name in known})
    except TypeError as error:
        raise CheckpointError(f"`{path}` is incomplete: {error}. The checkpoint is damaged; use another one.") from error
    if wrong := _first_wrong(manifest):
        raise CheckpointError(f"`{path}` was changed: `{wrong}` is {str(getattr(manifest, wrong))[:80]!r}. The checkpoint is "
                              "damaged; use another one.")
    return manifest


def _first_wrong(manifest: Manifest) -> str:
    """Return the name of the first field that does not hold what `Manifest` says, or ""."""
    samples = manifest.identity.get("base_samples", {}) if isinstance(manifest.identity, dict) else None
    checks = {
        "kind": manifest.kind in get_args(Kind),
        "step": type(manifest.step) is int and manifest.step >= 0,
        "adapter_name": isinstance(manifest.adapter_name, str),
        "has_training_state": isinstance(manifest.has_training_state, bool),
        "identity": isinstance(samples, dict) and all(_is_number(value) for value in samples.values())
        and isinstance(manifest.identity.get("model", {}), dict),
        "template": not manifest.template or (isinstance(manifest.template, dict) and isinstance(
            manifest.template.get("name"), str) and isinstance(manifest.template.get("options"), dict)),
        "files": isinstance(manifest.files, dict) and all(
            isinstance(entry, list) and len(entry) == 2 and all(type(number) is int for number in entry)
            for entry in manifest.files.values()),
        "saved_at": _is_number(manifest.saved_at),
    }
    return next((name for name, is_right in checks.items() if not is_right), "")


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def describe_files(folder: Path) -> dict[str, list[int]]:
    """Return path -> [size in bytes, CRC-32] of all files in `folder`."""
    return {path.relative_to(folder).as_posix(): [path.stat().st_size, checksum(path)]
            for path in sorted(folder.rglob("*")) if path.is_file() and path.name != FILE_NAME}


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value


def check_sizes(folder: Path, files: Mapping[str, list[int]]) -> None:
    """Raise `CheckpointError` naming the first file that is missing or of another size than when it was saved."""
    for name, (size, _) in files.items():
        path = folder / name
        with _readable(path):
            found = path.stat().st_size if path.is_file() else None
        if found is None:
            raise CheckpointError(f"`{path}` is missing: the checkpoint is incomplete. Use another one, or restore the file.")
        if found != size:
            raise CheckpointError(f"`{path}` has {found} bytes, {size} were saved: the file is truncated or was changed. Use "
                                  "another checkpoint, or restore the file.")


def verify(folder: Path) -> Manifest:
    """Return the manifest after comparing every file with it, checksums too. Raises: `CheckpointError` naming the file."""
    manifest = read_manifest(folder)
    check_sizes(folder, manifest.files)
    for name, (_, saved) in manifest.files.items():
        with _readable(folder / name):
            found = checksum(folder / name)
        if found != saved:
            raise CheckpointError(f"`{folder / name}` does not have the content that was saved: its checksum differs. Use another "
                                  "checkpoint, or restore the file.")
    return manifest


@contextmanager
def _readable(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"`{path}` cannot be read: {error}. Give yourself permission to read it, or use another "
                              "checkpoint.") from error
