"""Handles that were passed to a component: what they are where they arrive.

On a rank of the group that the handle is on, it is the object itself. Elsewhere it is a handle that calls that group directly. Two
processes that call one group at the same time are not ordered between its ranks, so such calls must not meet in a collective.
"""

from collections.abc import Sequence
from typing import Any

from twinkle_core import remote, session
from twinkle_core.launchers.interface import Launcher, Topology
from twinkle_core.mesh import DeviceGroup, DeviceMesh
from twinkle_core.remote.handle import ref_of
from twinkle_core.settings import LaunchRequest
from twinkle_ray.calls import call_group
from twinkle_ray.group import ActorGroup
from twinkle_ray.messages import Component
from twinkle_ray.worker import RANK


def open_handle(component: Component, ranks: ActorGroup) -> Any:
    """Return the object behind a handle if it lives in this process, else a handle on it."""
    active = session.active()
    rank = None if active is None else active.state.get(RANK)
    found = None if rank is None else rank.component_of(component.group, component.number)
    return remote.make_handle(component.cls, launcher=Peer(ranks), ref=component) if found is None else found


class Peer(Launcher):
    """Calls one group from a process that did not start it."""

    def __init__(self, ranks: ActorGroup) -> None:
        super().__init__(options={})
        self._ranks = ranks

    @classmethod
    def launch(cls, script: str | None, argv: Sequence[str], request: LaunchRequest) -> int:
        """Never reached: it is registered nowhere."""
        raise NotImplementedError

    def start(self, session: session.Session) -> None:
        """Never reached: no session has it."""
        raise NotImplementedError

    def create(
        self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], *, group: DeviceGroup | None, mesh: DeviceMesh | None,
    ) -> Any:
        """Never reached: no session has it."""
        raise NotImplementedError

    def call(self, handle: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], mark: remote.RemoteMark) -> Any:
        """Call the ranks and wait."""
        return call_group(self._ranks, ref_of(handle), method, args, kwargs, mark, data_states=None, leaves_results=False)

    def reduce(self, handle: Any) -> tuple[Any, ...]:
        """Return what makes it the object, or a handle, in the next process."""
        return open_handle, (ref_of(handle), self._ranks)

    def topology(self) -> Topology:
        """Never reached: no session has it."""
        raise NotImplementedError
