"""Where the data loaders of a run stand: what a checkpoint stores beside the optimizer, and how a loader finds its part again.

A checkpoint's `data_state.json` is the list of states of all loaders that were alive, in the order they were made. A loader finds
its own by its fingerprint (rows, batch size, shuffle, seed), and among equal ones by that order. Positions count rows of the
whole run, so they hold on another mesh.
"""

import json
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_core import session
from twinkle_core.errors import CheckpointError

if TYPE_CHECKING:
    from twinkle_core.dataloader.loader import DataLoader

STATE_FILE = "data_state.json"
_KEY = "dataloaders"
_GIVEN = "dataloaders.given"
_FIELDS = {"fingerprint": dict, "epoch": int, "rows": int}


def register(loader: "DataLoader") -> None:
    """Add a loader to those of the session. It is forgotten when nobody else holds it."""
    references = session.current().state.setdefault(_KEY, [])
    references[:] = [reference for reference in references if reference() is not None] + [weakref.ref(loader)]


def live_loaders() -> "list[DataLoader]":
    """Return the loaders of the session that are alive, in the order they were made."""
    active = session.active()
    references = [] if active is None else active.state.get(_KEY, [])
    return [loader for reference in references if (loader := reference()) is not None]


def collect_states() -> list[dict[str, Any]]:
    """Return the state of every live loader, for `data_state.json`: of this process, or those that `given` said."""
    active = session.active()
    states = None if active is None else active.state.get(_GIVEN)
    return [loader.get_state() for loader in live_loaders()] if states is None else states


@contextmanager
def given(states: list[dict[str, Any]]) -> Generator[None]:
    """Let `collect_states` return `states` meanwhile: a rank that writes a checkpoint has them from the script's process."""
    state = session.current().state
    state[_GIVEN] = states
    try:
        yield
    finally:
        del state[_GIVEN]


def read_state(checkpoint: Path, loader: "DataLoader") -> dict[str, Any]:
    """Return the state of `loader` that a checkpoint holds.

    Raises: `CheckpointError` if the checkpoint has no data position, or none of a loader like this one.
    """
    path = checkpoint / STATE_FILE
    try:
        states = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        what = "holds no data position" if checkpoint.is_dir() else "is not a folder"
        raise CheckpointError(f"`{checkpoint}` {what} (`{STATE_FILE}`). Save with `with_optimizer=True`, and pass the path that "
                              "`save` or `model.resume_from_checkpoint` returned.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"`{path}` cannot be read: {error}. The checkpoint is damaged; resume from another one.") from error
    if not isinstance(states, list):
        raise CheckpointError(f"`{path}` holds a {type(states).__name__}, not a list of positions. The checkpoint is damaged.")
    for state in states:
        check_state(state, where=f"`{path}`")
    return _matching(states, loader, path)


def _matching(states: list[dict[str, Any]], loader: "DataLoader", path: Path) -> dict[str, Any]:
    own = loader.fingerprint()
    like_me = [other for other in live_loaders() if other.fingerprint() == own]
    place = next(index for index, other in enumerate(like_me) if other is loader)
    found = [state for state in states if state["fingerprint"] == own]
    if place < len(found):
        return found[place]
    if found:
        raise CheckpointError(f"`{path}` holds {len(found)} positions of a data loader with {show(own)}, but this is number "
                              f"{place + 1} of that kind in this run. Build the loaders as the saved run did.")
    saved = "; ".join(show(state["fingerprint"]) for state in states) or "none"
    raise CheckpointError(f"This data loader has {show(own)}; `{path}` holds positions for: {saved}. Build dataset and loader as "
                          "the saved run did.")


def check_state(state: Any, *, where: str) -> None:
    """Raise `CheckpointError` unless `state` is what `get_state` returns."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{where} holds a {type(state).__name__} where the state of a data loader belongs. Pass what "
                              "`get_state` returned.")
    for name, kind in _FIELDS.items():
        if not isinstance(state.get(name), kind) or isinstance(state[name], bool):
            raise CheckpointError(f"{where}: the state of a data loader has `{name}` of type {kind.__name__}, this one has "
                                  f"{state.get(name)!r}. Pass what `get_state` returned.")
    rows = state["fingerprint"].get("rows", 0)
    if state["epoch"] < 0 or type(rows) is not int or not 0 <= state["rows"] <= rows:
        raise CheckpointError(f"{where}: epoch {state['epoch']}, row {state['rows']} lies outside {show(state['fingerprint'])}. "
                              "The state is damaged; use another checkpoint.")


def show(fingerprint: Mapping[str, Any]) -> str:
    """Return a fingerprint as text."""
    return ", ".join(f"{name}={value}" for name, value in fingerprint.items())
