"""What a checkpoint may be called, and what a path of one looks like.

`outputs/best` is the first version of the name `best`, `outputs/best@2` the second. A name that holds `@`, a separator or a leading
dot would be ambiguous or leave the folder, and is refused.
"""

import re
from pathlib import Path

from twinkle_core.errors import ArgumentError, ArgumentTypeError, CheckpointError

MAX_NAME_BYTES = 128
"""Below the 255 bytes that file systems allow, with room for a version and the marks of a folder that is being written."""

_VERSION = re.compile(r"(?P<name>[^@]+)@(?P<version>[1-9]\d*)")
_ALLOWED = f"Use 1 to {MAX_NAME_BYTES} bytes of letters, digits, `-`, `_`, `.` and the like, e.g. \"step-100\"."


def check_name(name: object) -> str:
    """Return `name` if a checkpoint may be called so. Raises: `ArgumentError`, `ArgumentTypeError`."""
    if not isinstance(name, str):
        raise ArgumentTypeError(f"The name of a checkpoint is a {type(name).__name__}. Pass a string, e.g. \"step-100\".")
    shown = name if len(name) <= 60 else f"{name[:60]}... ({len(name)} characters)"
    reason = ""
    if not name.strip():
        reason = "is empty"
    elif "/" in name or "\\" in name:
        reason = "holds a path separator; the folder goes into `output_dir`"
    elif "@" in name:
        reason = "holds `@`, which separates a name from its version"
    elif name.startswith("."):
        reason = "begins with a dot"
    elif not name.isprintable() or name != name.strip():
        reason = "holds a control character or spaces around it"
    elif len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        reason = f"is longer than {MAX_NAME_BYTES} bytes"
    if reason:
        raise ArgumentError(f"A checkpoint cannot be called {shown!r}: it {reason}. {_ALLOWED}")
    return name


def versioned(name: str, version: int) -> str:
    """Return the folder's name: `name`, then `name@2`, `name@3`."""
    return name if version == 1 else f"{name}@{version}"


def split_version(folder_name: str) -> tuple[str, int]:
    """Return (name, version) of a folder's name: ("best", 2) of "best@2", ("best", 1) of "best"."""
    match = _VERSION.fullmatch(folder_name)
    if match and match["version"] != "1":
        return match["name"], int(match["version"])
    return folder_name, 1


def local_path(path: object) -> Path:
    """Return the folder that a path or `file://` URI names.

    Raises: `ArgumentTypeError`; `ArgumentError` for an empty one; `CheckpointError` for a URI that lives elsewhere.
    """
    if not isinstance(path, str | Path):
        raise ArgumentTypeError(f"A checkpoint is named by a path, not a {type(path).__name__}. Pass what `save` returned.")
    text = str(path)
    scheme, separator, rest = text.partition("://")
    if not text.strip() or "\0" in text:
        raise ArgumentError(f"{text!r} is not the path of a checkpoint. Pass what `save` returned.")
    if not separator:
        try:
            return Path(text).expanduser()
        except RuntimeError as error:
            raise ArgumentError(f"{text!r} is not the path of a checkpoint: {error} Write the folder out.") from error
    if scheme == "file":
        return Path(rest)
    if scheme == "twinkle":
        raise CheckpointError(f"`{text}` is a checkpoint of the training service. It can be used by `twinkle_client` after "
                              "`init_twinkle_client`; in this process only folders can be loaded.")
    raise CheckpointError(f"`{text}` is not a checkpoint on this machine. Pass a folder; to start from a model of a hub, use "
                          f"`TransformersModel(model_id={text!r})`.")
