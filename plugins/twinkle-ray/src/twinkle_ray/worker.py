"""One rank: the Ray actor in which the components of a group live.

It is generic: told its place, it becomes a process in mode `local` as torchrun would have started it, so every parallel strategy
works inside a group. Components are built here by `remote.build`; several of them share the process and its process group. Ray
runs the calls of an actor one after the other, in the order in which the script made them.
"""

import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from twinkle_core import plugins, remote, session, settings
from twinkle_core.data_format import flatten_responses
from twinkle_core.dataloader.positions import given
from twinkle_core.launchers.local import LocalLauncher
from twinkle_core.remote.collect import join
from twinkle_core.remote.dispatch import cut_lists, map_lists, unit_starts
from twinkle_core.session import Session
from twinkle_ray.messages import Failure, Notes, Parcel, RankSetup, Request

RANK = "twinkle_ray.rank"
"""Where the session of a rank's process keeps its `Rank`."""


@dataclass(kw_only=True)
class RankSession(Session):
    """The session of a rank: as in mode `local`, but what is reported goes to the script, whose session has the trackers."""

    reported: list[tuple[int, dict[str, float]]] = field(default_factory=lambda: list[tuple[int, dict[str, float]]]())

    def report_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the numbers of a step for the answer to the present call; on the first rank only."""
        self.latest_metrics = dict(metrics)
        if self.launcher.topology().rank == 0:
            self.reported.append((step, dict(metrics)))


class Rank:
    """The process of one rank. Every method but `start` and those before it needs `start`."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._components: dict[int, Any] = {}
        self._unseen: Failure | None = None

    def __repr__(self) -> str:
        return self._label  # Ray puts it before every line that this process prints

    def where(self) -> dict[str, Any]:
        """Return where this process runs: node, address, host, process and devices."""
        context = ray.get_runtime_context()
        return {"node": context.get_node_id(), "address": ray.util.get_node_ip_address(), "host": socket.gethostname(),
                "pid": os.getpid(), "devices": {name: ids for name, ids in context.get_accelerator_ids().items() if ids}}

    def reserve_port(self) -> int:
        """Return a port that stays this process's until torch listens on it."""
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # torch may then listen on it beside this socket
        self._reserved.bind(("", 0))
        return self._reserved.getsockname()[1]

    def start(self, setup: RankSetup) -> None:
        """Become the rank that `setup` describes."""
        others = {name: value for name, value in setup.defaults.items() if name not in settings.environ()} | dict(setup.environ)
        if setup.device_type == "cpu":
            others["CUDA_VISIBLE_DEVICES"] = ""
        settings.become_rank(setup.place, run_id=setup.run_id, master_addr=setup.master[0], master_port=setup.master[1],
                             others=others)
        if Path(setup.folder).is_dir():
            os.chdir(setup.folder)
        sys.path[:0] = [folder for folder in setup.path if folder not in sys.path]
        launcher = LocalLauncher(options={})
        here = RankSession(mode="local", launcher=launcher, mesh=setup.mesh, groups=dict(setup.groups), seed=setup.seed)
        launcher.start(here)
        session.adopt(here)
        here.state[RANK] = self
        plugins.configure(here)
        self._setup = setup

    @ray.method(num_returns=2)
    def create(self, number: int, cls: type, call: Any) -> tuple[Any, Notes]:
        """Build a component under a number."""
        return self._answer(lambda: self._build(number, cls, call), what=f"`{cls.__name__}(...)`", wants_value=False)

    @ray.method(num_returns=2)
    def call(self, request: Request, call: Any) -> tuple[Any, Notes]:
        """Call a method of a component, or do nothing but fail again after a failure that nobody has seen."""
        if request.clears:
            self._unseen = None
        if self._unseen is not None:
            return self._unseen, Notes(failure=self._unseen)
        component = self._components[request.component]
        what = f"`{type(component).__name__}.{request.method}`"
        value, notes = self._answer(lambda: self._call(component, request, call), what=what, wants_value=request.wants_value,
                                    counts=request.is_lazy)
        if request.is_lazy:
            self._unseen = notes.failure
        return value, notes

    def drop(self, number: int) -> None:
        """Forget a component."""
        self._components.pop(number, None)

    def component_of(self, group: str, number: int) -> Any:
        """Return a component that lives in this process, or None. For others to which a handle on it was passed."""
        return self._components.get(number) if group == self._setup.group else None

    def stop(self) -> None:
        """End the session of this process."""
        session.stop()

    def _build(self, number: int, cls: type, call: Any) -> None:
        args, kwargs = _unpack(call)
        self._components[number] = remote.build(cls, args, kwargs)

    def _call(self, component: Any, request: Request, call: Any) -> Any:
        args, kwargs = _unpack(call)
        method = getattr(component, request.method)
        if request.data_states is None:
            return method(*args, **kwargs)
        with given(request.data_states):
            return method(*args, **kwargs)

    def _answer(
        self, function: Callable[[], Any], *, what: str, wants_value: bool, counts: bool = False,
    ) -> tuple[Any, Notes]:
        here = session.current()
        assert isinstance(here, RankSession), "started by `start`"
        before = here.latest_metrics
        here.reported = []
        try:
            value = function()
        except _ArgumentFailedError as error:
            return error.failure, Notes(failure=error.failure)
        except Exception as error:  # noqa: BLE001  the boundary to the script, which raises it again
            place = self._setup.place
            where = (f"{what} on rank {place.rank} of group `{self._setup.group}` (host {socket.gethostname()}, process "
                     f"{os.getpid()})")
            failure = Failure.of(error, where=where)
            return failure, Notes(failure=failure, metrics=here.reported)
        progress = here.latest_metrics if here.latest_metrics is not before else None
        notes = Notes(units=_units_of(value) if counts and wants_value else None, metrics=here.reported, progress=progress)
        return (value if wants_value else None), notes


class _ArgumentFailedError(Exception):
    """An argument is the result of a call that failed on another rank."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


def _unpack(call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with what lies on other ranks fetched."""
    args, kwargs = call
    return tuple(_opened(value) for value in args), {name: _opened(value) for name, value in kwargs.items()}


def _opened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _opened(item) for key, item in value.items()}
    if not isinstance(value, Parcel):
        return value
    pieces = ray.get(value.refs)
    for piece in pieces:
        if isinstance(piece, Failure):
            raise _ArgumentFailedError(piece)
    whole = pieces[0] if value.how is None else join(value.how, pieces)
    if value.is_sliced:
        (whole,), _ = map_lists(((whole,), {}), flatten_responses)
    if value.rows is not None:
        (whole,), _ = cut_lists(((whole,), {}), value.rows)
    return whole


def _units_of(value: Any) -> list[int] | None:
    if not isinstance(value, list):
        return None
    rows = flatten_responses(value)
    return [*unit_starts(rows), len(rows)]
