"""From an id that a user wrote to a path on disk.

Knows what a URI looks like, the order of looking (cache, then network) and the rule of trust. Which hubs there are comes from the
registry; how a hub is asked is theirs. Imports nothing heavy.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle_core import registry, settings
from twinkle_core.errors import ArgumentError, ArgumentTypeError, HubError, MissingExtraError, ModelError
from twinkle_core.hub.interface import Hub, Kind
from twinkle_core.hub.local import exists, near_path

TOKENIZER_PATTERNS = (
    "tokenizer*", "config.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken", "*.model",
    "chat_template*", "additional_chat_templates/*", "generation_config.json", "*.py",
)
"""Files that make a tokenizer and its chat template, without the weights."""

_URI = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_BARE_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Location:
    """Where an id points: the URI scheme, which is the name of a hub, and the id within that hub (of `file`: a path)."""

    scheme: str
    repo_id: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.repo_id}"


def parse_uri(text: str) -> Location:
    """Return where `text` points: `scheme://id`, or a local path (absolute, relative, `~`).

    Whether it exists there is not looked at, with one exception: a bare `org/name` is a path only if there is one.

    Raises:
        ArgumentError: `text` is empty or holds a NUL character.
        HubError: a bare name that is no local path; the text proposes `ms://` and `hf://`.
    """
    if not isinstance(text, str):
        raise ArgumentTypeError(f"The id of a model or dataset is {text!r}, of type {type(text).__name__}. Pass a string such as "
                                "\"ms://org/name\", \"hf://org/name\" or the path of a folder.")
    if not text.strip() or "\0" in text:
        raise ArgumentError(f"The id of a model or dataset is {text!r}. Pass \"ms://org/name\", \"hf://org/name\" or the path of "
                            "a folder.")
    match = _URI.fullmatch(text)
    if match:
        return Location(match["scheme"].lower(), match["rest"].rstrip("/") or match["rest"])
    if text.startswith(("/", "~", ".")) or exists(Path(text)):
        return Location("file", text)
    advice = f"Write `ms://{text}` for ModelScope or `hf://{text}` for Hugging Face" if _BARE_ID.fullmatch(text) else (
        "Write `ms://org/name` for ModelScope or `hf://org/name` for Hugging Face")
    raise HubError(f"`{text}` is neither a URI nor a path that exists in {Path.cwd()}.{near_path(Path(text))} {advice}, or the "
                   "path of a local folder.")


def resolve_model(
    model_id: str, *, revision: str | None = None, tokenizer_only: bool = False, trust_remote_code: bool | None = None,
) -> Path:
    """Return the folder of a model, downloading what no cache holds.

    Args:
        model_id: `ms://org/name`, `hf://org/name`, `tiny://name`, another installed hub's URI, or the path of a folder.
        revision: branch, tag or commit; None is the hub's default.
        tokenizer_only: the files of the tokenizer are enough. Loaders of tokenizers check trust by themselves.
        trust_remote_code: whether Python code inside the repository may run; None asks `TWINKLE_TRUST_REMOTE_CODE`.

    Raises:
        HubError: it cannot be found or fetched.
        ModelError: it needs code of its own and is not trusted; nothing but its `config.json` was downloaded.
    """
    hub, location = _find_hub(model_id)
    revision = _checked_revision(revision)
    if tokenizer_only:
        return _locate(hub, location, "model", revision, TOKENIZER_PATTERNS)
    folder = hub.find_cached(location.repo_id, kind="model", revision=revision)
    if folder is None:
        if hub.is_remote:
            config = _locate(hub, location, "model", revision, ("config.json",))
            check_trust(config, model_id, trust_remote_code=trust_remote_code)
        folder = hub.fetch(location.repo_id, kind="model", revision=revision)
    check_trust(folder, model_id, trust_remote_code=trust_remote_code)
    return folder


def resolve_dataset(dataset_id: str, *, revision: str | None = None) -> Path:
    """Return the folder of a dataset, or the file that a local path names, downloading what no cache holds.

    Args:
        dataset_id: as `model_id` of `resolve_model`; a local path may be a single file.
        revision: branch, tag or commit; None is the hub's default.

    Raises: `HubError` if it cannot be found or fetched.
    """
    hub, location = _find_hub(dataset_id)
    return _locate(hub, location, "dataset", _checked_revision(revision), ())


def check_trust(folder: Path, model_id: str, *, trust_remote_code: bool | None = None) -> None:
    """Raise `ModelError` if the model in `folder` needs Python code of its own to load, and may not run it.

    It needs it if `config.json` has an `auto_map` and transformers has no class for its `model_type`; a model that it knows
    loads without the code that lies beside it. `trust_remote_code=None` asks `TWINKLE_TRUST_REMOTE_CODE`.
    """
    trusted = settings.trust_remote_code() if trust_remote_code is None else trust_remote_code
    if trusted:
        return
    config = _read_config(folder / "config.json")
    if not config.get("auto_map") or _is_known_to_transformers(str(config.get("model_type"))):
        return
    targets = (target for value in config["auto_map"].values() for target in (value if isinstance(value, list) else [value]))
    files = sorted({str(target).split("--")[-1].split(".")[0] + ".py" for target in targets if target})
    raise ModelError(
        f"`{model_id}` (model type `{config.get('model_type')}`) can only be loaded by running code that ships with it "
        f"({', '.join(f'`{name}`' for name in files)}). Read that code first; if you trust it, pass trust_remote_code=True or set "
        "TWINKLE_TRUST_REMOTE_CODE=1.")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise HubError(f"{path} cannot be read as JSON: {error}. Delete the file and fetch the model again.") from error
    return config if isinstance(config, dict) else {}


def _is_known_to_transformers(model_type: str) -> bool:
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise MissingExtraError("Reading the configuration of a model needs the package `transformers`, which is not installed. "
                                "Run: pip install 'twinkle-core[data]'") from error
    return model_type in CONFIG_MAPPING


def _find_hub(text: str) -> tuple[Hub, Location]:
    location = parse_uri(text)
    return registry.resolve("hubs", location.scheme)(), location


def _locate(hub: Hub, location: Location, kind: Kind, revision: str | None, patterns: tuple[str, ...]) -> Path:
    cached = hub.find_cached(location.repo_id, kind=kind, revision=revision, patterns=patterns)
    return cached if cached is not None else hub.fetch(location.repo_id, kind=kind, revision=revision, patterns=patterns)


def _checked_revision(revision: str | None) -> str | None:
    if revision is not None and (not re.fullmatch(r"\w[\w./+-]{0,199}", revision) or ".." in revision):
        raise ArgumentError(f"`revision={revision!r}` is not the name of a branch, tag or commit. Leave it out for the default.")
    return revision
