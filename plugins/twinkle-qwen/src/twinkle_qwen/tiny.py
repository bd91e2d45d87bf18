"""`tiny://`: small random models, their tokenizer and a small dataset, which need no network.

    tiny://qwen3_5  tiny://qwen3  tiny://qwen3_moe  tiny://qwen3_5_vl     models
    tiny://self-cognition                                                 rows: query, response, tag

Data lies in the package. A model is written into Twinkle's cache when it is first used, each version of it in a folder of its own.
A folder appears there whole or not at all, whichever of several processes writes it.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from twinkle_core import settings
from twinkle_core.errors import HubError, did_you_mean, listing
from twinkle_core.hub.completeness import what_is_missing
from twinkle_core.hub.interface import Hub, Kind
from twinkle_qwen import __version__
from twinkle_qwen.tiny_models import ASSETS, RECIPES, write_model, write_tokenizer

DATASETS = {"self-cognition": ASSETS / "self-cognition"}


class TinyHub(Hub):
    """What ships with twinkle-qwen. There are no revisions and no uploads."""

    is_remote = False

    def find_cached(self, repo_id: str, *, kind: Kind, revision: str | None = None, patterns: Sequence[str] = ()) -> Path | None:
        """Return the folder if it is there already; data always is. None for what does not exist."""
        if _problem(repo_id, kind, revision):
            return None
        if kind == "dataset":
            return DATASETS[repo_id]
        whole, tokenizer = _folder(repo_id), _folder(f"{repo_id}-tokenizer")
        for folder in (whole, tokenizer) if patterns else (whole,):
            if folder.is_dir() and not what_is_missing(folder, kind=kind, patterns=patterns):
                return folder
        return None

    def fetch(self, repo_id: str, *, kind: Kind, revision: str | None = None, patterns: Sequence[str] = ()) -> Path:
        """Return the folder, writing it first if need be. With `patterns`, the weights are left out.

        Raises:
            HubError: there is no such model or dataset, or the cache cannot be written.
            MissingExtraError: a model's weights are wanted and torch is not installed.
        """
        problem = _problem(repo_id, kind, revision)
        if problem:
            raise HubError(problem)
        found = self.find_cached(repo_id, kind=kind, revision=revision, patterns=patterns)
        if found is not None:
            return found
        if patterns:
            return _write(_folder(f"{repo_id}-tokenizer"), lambda folder: write_tokenizer(repo_id, folder))
        return _write(_folder(repo_id), lambda folder: write_model(repo_id, folder))

    def upload(self, folder: Path, repo_id: str, *, kind: Kind, private: bool = True) -> str:
        """Raise `HubError`: what ships with a package cannot be changed."""
        raise HubError(f"`tiny://{repo_id}` cannot be uploaded to: it ships with twinkle-qwen. Upload to `ms://org/name` or "
                       "`hf://org/name`, or copy the folder to a local path.")

    def describe(self) -> str:
        """Return what there is and where models are written."""
        return f"tiny: {listing([*RECIPES, *DATASETS])}, models in {settings.cache_dir() / 'tiny'}, no network needed"


def _problem(repo_id: str, kind: Kind, revision: str | None) -> str:
    """Return why there is no such thing here, or ""."""
    known, others = (RECIPES, DATASETS) if kind == "model" else (DATASETS, RECIPES)
    if repo_id not in known:
        hint = f" It is a {'dataset' if kind == 'model' else 'model'}." if repo_id in others else did_you_mean(repo_id, known)
        return f"twinkle-qwen {__version__} has no {kind} {f'tiny://{repo_id}'!r}.{hint} Its {kind}s: {listing(known)}."
    if revision is not None:
        return f"`tiny://{repo_id}` has no revision `{revision}`: it has none at all. Leave `revision` out."
    return ""


def _folder(name: str) -> Path:
    """Return the cache folder of this version of `name`: the digest changes with whatever decides the files."""
    digest = hashlib.sha256()
    for source in (Path(__file__).with_name("tiny_models.py"), *sorted(path for path in ASSETS.rglob("*") if path.is_file())):
        digest.update(source.read_bytes())
    return settings.cache_dir() / "tiny" / f"{name}-{digest.hexdigest()[:8]}"


def _write(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Fill a temporary folder and rename it to `folder`, unless another process was first. Return `folder`."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise _not_writable(folder, error) from error
    try:
        fill(draft)
        draft.chmod(0o755)
        _put(draft, folder)
    except OSError as error:
        raise _not_writable(folder, error) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _put(draft: Path, folder: Path) -> None:
    try:
        os.rename(draft, folder)
        return
    except OSError:
        if not folder.is_dir():
            raise
    kind: Kind = "model"
    patterns = ("tokenizer*",) if folder.name.rpartition("-")[0].endswith("-tokenizer") else ()
    if what_is_missing(folder, kind=kind, patterns=patterns):  # damaged, e.g. by a cleaner of caches: put the new one in its place
        broken = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        os.rename(folder, broken / "old")
        shutil.rmtree(broken, ignore_errors=True)
        os.rename(draft, folder)


def _not_writable(folder: Path, error: OSError) -> HubError:
    return HubError(f"The small model {folder} cannot be written: {error}. Free space there, or set TWINKLE_CACHE to a folder that "
                    "can be written.")
