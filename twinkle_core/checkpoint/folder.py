"""Writing, listing and deleting checkpoint folders, so that a name never shows half a checkpoint and never changes its meaning.

A checkpoint is written under a hidden name in the same folder, synced to disk and renamed; whoever dies on the way leaves a
hidden folder that no listing shows and a later save removes. Versions are claimed and old ones deleted under an advisory lock on
the folder itself, so no lock file is left behind. What is inside a checkpoint is left to others.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from twinkle_core.checkpoint.manifest import FILE_NAME, Manifest, check_sizes, describe_files, read_manifest
from twinkle_core.checkpoint.naming import check_name, local_path, split_version, versioned
from twinkle_core.errors import ArgumentError, CheckpointError, TwinkleError
from twinkle_core.warning import warn

_UNFINISHED = ".twinkle-unfinished-"
_FOREIGN_STALE_S = 24 * 3600.0
"""A lock on another host's folder may not be visible here; after a day without a write its save is over."""


class CheckpointWriter:
    """Writes one checkpoint: in a `with` block fill its `folder`, then call `commit(manifest)`.

    Leaving the block without `commit`, or with an error, leaves nothing behind. A full disk or missing permission becomes a
    `CheckpointError`; checkpoints that exist already are not touched.

    Args:
        output_dir: folder of checkpoints; made if need be.
        name: of the checkpoint.
        needed_bytes: roughly what will be written, so that a disk without room is noticed before the first byte.

    Attributes:
        folder: the hidden folder to write files into; their names are kept.
    """

    def __init__(self, output_dir: str | Path, name: str, *, needed_bytes: int = 0) -> None:
        self._parent = local_path(output_dir)
        self._name = check_name(name)
        self._needed_bytes = needed_bytes
        self._lock = -1
        self.folder = _hidden(self._parent)

    def __enter__(self) -> "CheckpointWriter":
        with self._translated():
            if not self._parent.is_dir():
                self._parent.mkdir(parents=True)
                _sync(self._parent.parent)
            with _locked(self._parent):  # nobody takes the new folder for an abandoned one before it is locked
                remove_stale(self._parent)
                self.folder.mkdir()
                self._lock = os.open(self.folder, os.O_RDONLY)
                _try_lock(self._lock)  # says to other processes that the owner lives
            if shutil.disk_usage(self._parent).free < self._needed_bytes:
                self._discard()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._discard()
        if _is_disk_error(error):
            raise self._failure(error) from error

    def _discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def commit(self, manifest: Manifest, *, keep_last: int | None = None) -> Path:
        """Make the checkpoint appear under its name, or the next version of it, and return its folder.

        `manifest.files` is filled here. `keep_last`: of this name, kind and adapter, delete all but the last so many versions.
        """
        check_keep_last(keep_last)
        with self._translated():
            described = replace(manifest, files=describe_files(self.folder))
            (self.folder / FILE_NAME).write_text(described.to_json(), "utf-8")
            _sync_tree(self.folder)
            with _locked(self._parent):
                target = self._claim()
                _sync(self._parent)
                doomed = _hide_older(self._parent, self._name, keep_last, described, newest=target) if keep_last else []
        for path in doomed:
            shutil.rmtree(path, ignore_errors=True)
        return target

    def _claim(self) -> Path:
        version = max(versions(self._parent, self._name), default=0) + 1
        while True:
            target = self._parent / versioned(self._name, version)
            try:
                if not target.exists():  # else rename would replace an empty folder
                    self.folder.rename(target)
                    return target
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
            version += 1

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: BaseException | None) -> CheckpointError:
        target = self._parent / self._name
        if _is_full(error):
            return CheckpointError(f"`{target}` was not saved: {_full_disk(self._parent, self._needed_bytes)}. Earlier checkpoints "
                                   "are untouched. Free space, save elsewhere with `output_dir=`, or keep fewer with `keep_last=`.")
        return CheckpointError(f"`{target}` was not saved: {error}. Earlier checkpoints are untouched. Check that `output_dir` is "
                               "a folder that can be written to.")


def check_keep_last(keep_last: object) -> None:
    """Raise `ArgumentError` unless `keep_last` is None or an integer >= 1."""
    if keep_last is not None and (isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1):
        raise ArgumentError(f"`keep_last={keep_last!r}`: use an integer >= 1, or None to keep all versions.")


def versions(folder: Path, name: str) -> dict[int, Path]:
    """Return version -> folder of everything called `name` or `name@N`, oldest first."""
    if not folder.is_dir():
        return {}
    found = {version: path for path in folder.iterdir() for stem, version in [split_version(path.name)] if stem == name}
    return dict(sorted(found.items()))


def complete_checkpoints(folder: Path) -> list[tuple[Path, Manifest]]:
    """Return the complete checkpoints directly in `folder`, oldest first: by step, then by time.

    Hidden folders and those without `checkpoint.json` are none. One whose files are missing or truncated is left out with a
    warning that names the file.
    """
    found, damaged = survey(folder)
    for error in damaged.values():
        warn(f"Passed over a damaged checkpoint. {error}")
    return found


def survey(folder: Path) -> tuple[list[tuple[Path, Manifest]], dict[Path, CheckpointError]]:
    """Return the complete checkpoints directly in `folder`, oldest first, and why each of the others cannot be used."""
    found: list[tuple[Path, Manifest]] = []
    damaged: dict[Path, CheckpointError] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or not is_checkpoint(path):
            continue
        try:
            manifest = read_manifest(path)
            check_sizes(path, manifest.files)
        except CheckpointError as error:
            damaged[path] = error
        else:
            found.append((path, manifest))
    return sorted(found, key=lambda item: (item[1].step, item[1].saved_at)), damaged


def newest_complete(folder: str | Path) -> Path | None:
    """Return the newest complete checkpoint directly in `folder`, by step and then by time, or None."""
    path = Path(folder).expanduser()
    found = complete_checkpoints(path) if path.is_dir() else []
    return found[-1][0] if found else None


def is_checkpoint(folder: Path) -> bool:
    """Return whether `folder` itself is a checkpoint, complete or not, rather than a folder of several."""
    return (folder / FILE_NAME).is_file()


def remove_stale(folder: Path) -> None:
    """Remove what killed saves left in `folder`. One that may still be running is left alone."""
    for path in folder.glob(f"{_UNFINISHED}*"):
        with contextlib.suppress(OSError):  # another process removes it too
            if _is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: Path) -> bool:
    is_own_host = path.name.removeprefix(_UNFINISHED).startswith(f"{_host()}-")
    if not is_own_host and time.time() - path.stat().st_mtime < _FOREIGN_STALE_S:
        return False
    lock = os.open(path, os.O_RDONLY)
    try:
        return _try_lock(lock)
    finally:
        os.close(lock)


def _hide_older(folder: Path, name: str, keep_last: int, like: Manifest, *, newest: Path) -> list[Path]:
    """Rename all but the last versions, so that they vanish from listings at once, and return where they are now.

    Only versions of the same kind and adapter count. One whose manifest cannot be read, such as a newer Twinkle's, stays.
    """
    saved: list[Path] = []
    for path in versions(folder, name).values():
        with contextlib.suppress(CheckpointError):
            manifest = read_manifest(path)
            if (manifest.kind, manifest.adapter_name) == (like.kind, like.adapter_name):
                saved.append(path)
    return [path.rename(_hidden(folder)) for path in saved[:-keep_last] if path != newest]


def _hidden(folder: Path) -> Path:
    return folder / f"{_UNFINISHED}{_host()}-{os.getpid()}-{secrets.token_hex(4)}"


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync(Path(parent) / name)
        _sync(Path(parent))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: rename still claims a version for one only
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _host() -> str:
    return hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()


def _is_disk_error(error: BaseException | None) -> bool:
    return not isinstance(error, TwinkleError) and (isinstance(error, OSError) or _is_full(error))


def _is_full(error: BaseException | None) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return True
    # safetensors reports the errors of the operating system in the text of its own exception
    return type(error).__name__ == "SafetensorError" and any(f"os error {code}" in str(error) for code in
                                                            (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def _full_disk(folder: Path, needed_bytes: int) -> str:
    needed = f"about {_mib(needed_bytes)} are needed, " if needed_bytes else ""
    return f"the disk is full ({needed}{_mib(shutil.disk_usage(folder).free)} are free)"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
