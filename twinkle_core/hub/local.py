"""Local folders and files, as the hub whose scheme is `file`."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from twinkle_core.errors import HubError, did_you_mean
from twinkle_core.hub.completeness import what_is_missing
from twinkle_core.hub.interface import Hub, Kind


class LocalHub(Hub):
    """Paths: absolute, relative to the working directory, or from the home folder (`~`). There are no revisions."""

    is_remote = False

    def find_cached(self, repo_id: str, *, kind: Kind, revision: str | None = None, patterns: Sequence[str] = ()) -> Path | None:
        """Return the folder or file if it exists and no part of it is missing."""
        path = _expand(repo_id)
        return path if exists(path) and not _problem(path, kind, patterns) else None

    def fetch(self, repo_id: str, *, kind: Kind, revision: str | None = None, patterns: Sequence[str] = ()) -> Path:
        """Return what `find_cached` finds. Raises: `HubError` with what is missing, as nothing can be fetched."""
        found = self.find_cached(repo_id, kind=kind, patterns=patterns)
        if found is not None:
            return found
        path = _expand(repo_id)
        if exists(path):
            raise HubError(f"{path} is not a complete {kind}: {_problem(path, kind, patterns)}. Copy it again, or give "
                           "another path.")
        parent = path.parent
        siblings = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
        where = f"{parent} holds no `{path.name}`.{did_you_mean(path.name, siblings)}" if siblings else (
            f"{parent} is empty." if parent.is_dir() else f"There is no folder {parent}.")
        raise HubError(f"The {kind} {path} does not exist: {where} Check the path; ids of hubs begin with `ms://` or `hf://`.")

    def upload(self, folder: Path, repo_id: str, *, kind: Kind, private: bool = True) -> str:
        """Copy `folder` to the path `repo_id`. Raises: `HubError` if something is there already, or it cannot be written."""
        target = _expand(repo_id)
        try:
            shutil.copytree(folder, target)
        except FileExistsError as error:
            raise HubError(f"{target} exists already. Name a path that does not exist, or delete it first.") from error
        except (OSError, shutil.Error) as error:
            raise HubError(f"{folder} cannot be copied to {target}: {error}. Check the path, its permissions and the space left "
                           "on the disk.") from error
        return f"file://{target}"

    def describe(self) -> str:
        """Return the working directory, which relative paths start from."""
        return f"local paths, relative to {Path.cwd()}"


def exists(path: Path) -> bool:
    """Return whether there is something at `path`; what cannot be a path (too long, a NUL character) does not exist."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def near_path(path: Path) -> str:
    """Return " Did you mean ...?" with what lies beside `path` and is called nearly so, or ""."""
    try:
        beside = [str(path.with_name(entry.name)) for entry in path.parent.iterdir()]
        return did_you_mean(str(path), beside)
    except (OSError, ValueError):
        return ""


def expand_home(text: str) -> Path:
    """Return the path with `~` replaced; that of a user who does not exist stays as it is, and does not exist."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def _problem(path: Path, kind: Kind, patterns: Sequence[str]) -> str:
    if kind == "dataset":
        if path.is_dir():
            return "" if any(path.iterdir()) else "it holds no files"
        return "" if path.is_file() else "it is a device, pipe or socket, not a file"
    return what_is_missing(path, kind=kind, patterns=patterns) if path.is_dir() else "it is a file, not a folder"


def _expand(text: str) -> Path:
    path = expand_home(text)
    if not exists(path) and "%" in text:
        decoded = expand_home(unquote(text))
        path = decoded if exists(decoded) else path
    return path.absolute()
