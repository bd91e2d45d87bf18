"""Environment variables: the only module that reads or sets them.

Twinkle's own begin with `TWINKLE_`; bare names such as `MODE` or `SEED` are never taken as options. A value that is not one of
the allowed literals is an error, so `TWINKLE_TRUST_REMOTE_CODE=0` means off.
"""

import difflib
import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from twinkle_core.errors import ArgumentError, listing

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
_LAUNCH = "TWINKLE_LAUNCH"
DEBUG = "TWINKLE_DEBUG"


def environ() -> Mapping[str, str]:
    """Return the environment, for the hook `twinkle_detect_launcher`."""
    return os.environ


def _flag(name: str, *, default: bool) -> bool:
    value = os.environ.get(name)
    if value is None:
        return default
    if value.strip().lower() in _TRUE:
        return True
    if value.strip().lower() in _FALSE:
        return False
    raise ArgumentError(f"The environment variable `{name}={value}` is not a switch. Use 1 or 0.")


def trust_remote_code() -> bool:
    """`TWINKLE_TRUST_REMOTE_CODE`: whether code that ships with a model may run where the script does not say. Default: no."""
    return _flag("TWINKLE_TRUST_REMOTE_CODE", default=False)


def debug() -> bool:
    """`TWINKLE_DEBUG`, which `twinkle --debug` sets: whether errors show every frame. Default: no."""
    return _flag(DEBUG, default=False)


def cache_dir() -> Path:
    """`TWINKLE_CACHE`: where Twinkle keeps what it makes itself. Default: `twinkle` in `XDG_CACHE_HOME`, else in `~/.cache`."""
    own, shared = os.environ.get("TWINKLE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own).expanduser() if own else (Path(shared) if shared else Path("~/.cache").expanduser()) / "twinkle"


def disabled_plugins() -> frozenset[str]:
    """`TWINKLE_DISABLE_PLUGINS`: plugins that are not loaded, separated by commas.

    An entry is the name of an entry point, of a distribution, or "distribution:entry-point", which means one plugin always.
    """
    return frozenset(name.strip() for name in os.environ.get("TWINKLE_DISABLE_PLUGINS", "").split(",") if name.strip())


@dataclass(frozen=True)
class ProcessRank:
    """The place of this process among those that `torchrun` started."""

    rank: int
    local_rank: int
    world_size: int
    restart: int = 0


def torchrun_rank() -> ProcessRank | None:
    """Return the place of this process if `torchrun` started it, else None.

    torchrun is recognised by `TORCHELASTIC_RUN_ID`, which nothing else sets; a bare `WORLD_SIZE` means nothing.

    Raises: `ArgumentError` if that variable is set and the others that torchrun sets with it are missing or make no sense.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    said = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    said["TORCHELASTIC_RESTART_COUNT"] = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    numbers = [int(text) for text in said.values() if text is not None and text.isascii() and text.isdigit()]
    if len(numbers) != len(said) or not numbers[1] <= numbers[0] < numbers[2]:
        found = ", ".join(f"{name}={'is not set' if text is None else text}" for name, text in said.items())
        raise ArgumentError(f"`TORCHELASTIC_RUN_ID` is set, as torchrun does, but {found}: no rank below a number of processes. "
                            "Start the script with torchrun, or unset `TORCHELASTIC_RUN_ID`.")
    rank, local_rank, world_size, restart = numbers
    return ProcessRank(rank, local_rank, world_size, restart=restart)


def become_rank(place: ProcessRank, *, run_id: str, master_addr: str, master_port: int, others: Mapping[str, str]) -> None:
    """Give this process the variables that torchrun would have given this rank, and `others`.

    For launchers whose processes exist before they know their place. What the command line asked of the script is not for a rank.
    """
    os.environ.update(others)
    os.environ.pop(_LAUNCH, None)
    os.environ.update(
        TORCHELASTIC_RUN_ID=run_id, TORCHELASTIC_RESTART_COUNT=str(place.restart), RANK=str(place.rank),
        LOCAL_RANK=str(place.local_rank), WORLD_SIZE=str(place.world_size), MASTER_ADDR=master_addr, MASTER_PORT=str(master_port))


def elastic_error_file() -> str | None:
    """Return the file in which torch's elastic agent looks for the error of this rank, if it started this process."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE")


def thread_environ(nproc: int) -> dict[str, str]:
    """Return `OMP_NUM_THREADS=1` for several processes on one node, as torchrun does, unless it is set already."""
    return {"OMP_NUM_THREADS": "1"} if nproc > 1 and "OMP_NUM_THREADS" not in os.environ else {}


@contextmanager
def quiet_torch() -> Generator[None]:
    """Let torch, if it is imported meanwhile, leave out the warnings of its C++ part, whose stack traces hide what went wrong."""
    name = "TORCH_CPP_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "ERROR"
    try:
        yield
    finally:
        del os.environ[name]


def gloo_environ(interface: str | None) -> dict[str, str]:
    """Return `GLOO_SOCKET_IFNAME` unless it is set: gloo takes the interface of the host's name, which often is the loopback."""
    return {"GLOO_SOCKET_IFNAME": interface} if interface and "GLOO_SOCKET_IFNAME" not in os.environ else {}


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """What the command line asked for. `None` and missing options were left to the script.

    Attributes:
        mode: value for `initialize(mode=)`.
        mesh: as `DeviceMesh.parse` reads it.
        nproc_per_node: processes a node.
        groups: group name -> ranks.
        options: the launcher's own options.
    """

    mode: str | None = None
    mesh: str | None = None
    nproc_per_node: int | None = None
    groups: dict[str, int] = field(default_factory=lambda: dict[str, int]())
    options: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())

    def to_environ(self) -> dict[str, str]:
        """Return the variables that hand this request to a process which a launcher starts."""
        return {_LAUNCH: json.dumps(asdict(self))}


def launch_request() -> LaunchRequest:
    """Return what `twinkle launch` asked of this process; empty when the script was started by itself."""
    text = os.environ.get(_LAUNCH)
    if not text:
        return LaunchRequest()
    try:
        values = json.loads(text)
        return LaunchRequest(**values)
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"The environment variable `{_LAUNCH}` is set by `twinkle launch` and holds {text!r}, which it "
                            "did not write. Unset it.") from error


def check_environ() -> None:
    """Raise `ArgumentError` for a variable that is most likely a typo of one of Twinkle's.

    Others that begin with `TWINKLE_` pass: plugins have variables of their own.
    """
    known = (_LAUNCH, DEBUG, "TWINKLE_DISABLE_PLUGINS", "TWINKLE_TRUST_REMOTE_CODE", "TWINKLE_CACHE")
    for name in os.environ:
        if name.startswith("TWINKLE_") and name not in known:
            own = [word.removeprefix("TWINKLE_") for word in known]  # the common beginning would make everything look alike
            near = difflib.get_close_matches(name.removeprefix("TWINKLE_"), own, n=1, cutoff=0.75)
            if near:
                raise ArgumentError(f"The environment variable `{name}` means nothing to Twinkle. Did you mean "
                                    f"`TWINKLE_{near[0]}`? Known: {listing(known)}.")


def update_environ(variables: Mapping[str, str]) -> None:
    """Set variables for this process and those that it starts."""
    os.environ.update(variables)


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set those of these variables that are not set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


@contextmanager
def tokenizers_in_one_thread() -> Generator[None]:
    """Keep the `tokenizers` library from threads inside processes started meanwhile: it would warn and fight for the cores."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
