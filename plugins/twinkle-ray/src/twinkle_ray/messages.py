"""What travels between the script and the ranks: plain data, and how failures are packed and raised again.

A call answers with two objects: its value, which may stay where it is, and `Notes`, which are small and go to the script at once.
"""

import linecache
import pickle
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ray import cloudpickle  # the one that carries the arguments: it knows which classes it has sent

from twinkle_core.errors import WorkerError
from twinkle_core.mesh import DeviceGroup, DeviceMesh
from twinkle_core.settings import ProcessRank

_INSIDE = ("twinkle", "twinkle_core", "twinkle_ray", "ray", "contextlib", "functools")


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """What a rank is told before anything is built on it.

    Attributes:
        group: the name of its group.
        place: its number among the ranks of the group, and among those on its machine.
        run_id: tells this group from all others.
        master: address and port where the ranks of the group meet.
        device_type: what its components run on.
        mesh: arrangement of the ranks for components that say none.
        groups: all groups of the run.
        seed: of everything that draws.
        environ: variables to set, before torch is imported.
        defaults: variables to set where the machine does not say otherwise.
        path: folders from which the script imports.
        folder: the script's working directory.
    """

    group: str
    place: ProcessRank
    run_id: str
    master: tuple[str, int]
    device_type: str
    mesh: DeviceMesh
    groups: Mapping[str, DeviceGroup]
    seed: int
    environ: Mapping[str, str]
    defaults: Mapping[str, str]
    path: list[str]
    folder: str


@dataclass(frozen=True)
class Component:
    """What a handle refers to: a numbered object on every rank of a group, and how these ranks are arranged for it."""

    number: int
    cls: type
    group: str
    mesh: DeviceMesh

    def __repr__(self) -> str:
        return f"number {self.number} on group `{self.group}`"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An error on a rank. It is also the value of the call that failed, so that whoever was to use the value fails too.

    Attributes:
        error: the pickled exception; None if it cannot travel.
        text: class and message.
        trace: the rank's traceback.
        where: method, rank, group, host and process, for people.
        time: seconds since 1970.
        is_death: whether the process is gone.
    """

    error: bytes | None
    text: str
    trace: str
    where: str
    time: float
    is_death: bool = False

    @classmethod
    def of(cls, error: BaseException, *, where: str) -> "Failure":
        """Return how `error`, now being handled, ended a call."""
        text = f"{type(error).__name__}: {error}"
        return cls(error=_packed(error), text=text, trace=_trace(error), where=where, time=time.time())

    def throw(self, site: "Site") -> NoReturn:
        """Raise the rank's error in this process, with the rank's traceback and the line of the script as a note."""
        error: BaseException | None = None
        if self.error is not None:
            try:
                error = pickle.loads(self.error)
            except Exception:  # noqa: BLE001  a class that this process cannot import
                error = None
        if error is None:
            error = WorkerError(self.text if self.is_death else f"{self.text} (its class cannot be carried to the script)")
        trace = f"\n{self.trace.rstrip()}" if self.trace else ""
        error.add_note(f"In {self.where}, called at {site}.{trace}")
        raise error


def _packed(error: BaseException) -> bytes | None:
    """Return the pickled exception; None if its class cannot be pickled, or be made again from what pickle keeps."""
    try:
        packed: bytes = cloudpickle.dumps(error)  # type: ignore[reportPrivateImportUsage]
        pickle.loads(packed)
    except Exception:  # noqa: BLE001  foreign classes: anything may be raised
        return None
    return packed


def _trace(error: BaseException) -> str:
    """Return the traceback from the first frame that is not of `worker` or Ray, where the component begins."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").partition(".")[0] in ("ray", "twinkle_ray"):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


@dataclass(frozen=True, kw_only=True)
class Site:
    """A line of the script."""

    file: str
    line: int

    @classmethod
    def here(cls) -> "Site":
        """Return the innermost line that belongs neither to Twinkle nor to Ray."""
        frame = sys._getframe(1)
        while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _INSIDE:
            frame = frame.f_back
        return cls(file=frame.f_code.co_filename, line=frame.f_lineno)

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.line).strip()
        return f"{self.file}:{self.line}" + (f", `{text}`" if text else "")


@dataclass(frozen=True, kw_only=True)
class Notes:
    """What the script is told of a call at once.

    Attributes:
        failure: how it failed, or None.
        units: where the list in the value may be cut, with its length at the end and a `SampleResponse` counted once a sequence;
            None if nobody asked, or it is no list.
        metrics: (step, numbers) that the component reported.
        progress: numbers for the progress bar, if they changed.
    """

    failure: Failure | None = None
    units: list[int] | None = None
    metrics: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    progress: dict[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """An argument that lies on other ranks: fetched from there by the rank that needs it.

    Attributes:
        refs: where its pieces lie.
        how: how they are joined; None: there is one, taken as it is.
        rows: which rows of its lists are meant; None: all.
        is_sliced: whether responses in it become features, as in every argument that is cut.
    """

    refs: list[Any]
    how: Any = None
    rows: range | None = None
    is_sliced: bool = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """A call of a method.

    Attributes:
        component: the number of the component.
        method: its name.
        wants_value: whether the script, or another rank, uses this rank's result.
        data_states: positions of the script's data loaders, for a checkpoint.
        is_lazy: whether nobody waits for this call. Then calls that follow a failure fail with it.
        clears: whether the failure of an earlier call has been seen.
    """

    component: int
    method: str
    wants_value: bool = True
    data_states: list[dict[str, Any]] | None = None
    is_lazy: bool = False
    clears: bool = False
