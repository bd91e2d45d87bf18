"""A launcher that plays a cluster inside one process, for tests of components and of code that meets handles."""

from collections.abc import Sequence
from typing import Any

from twinkle_core import remote, session
from twinkle_core.launchers.interface import Launcher, Topology
from twinkle_core.mesh import DeviceGroup, DeviceMesh
from twinkle_core.remote.collect import collect
from twinkle_core.remote.dispatch import dispatch
from twinkle_core.remote.handle import ref_of
from twinkle_core.settings import LaunchRequest


class InProcessCluster(Launcher):
    """Builds a component once a rank, in this process, and calls the ranks one after the other.

    Arguments and results pass through dispatch and collect as on a real cluster. `calls` holds (class, method) of every call.
    Not for components that meet in a collective: the ranks run in turn.
    """

    calls: list[tuple[str, str]]

    @classmethod
    def start_session(cls, *, mesh: DeviceMesh) -> "InProcessCluster":
        """Make this the launcher of a new session whose components live on the ranks of `mesh`, and return it."""
        launcher = cls(options={})
        launcher.calls = []
        launcher.mesh = mesh
        session.adopt(session.Session(mode="in-process", launcher=launcher, mesh=mesh))
        return launcher

    mesh: DeviceMesh

    @classmethod
    def launch(cls, script: str | None, argv: Sequence[str], request: LaunchRequest) -> int:
        """Not from the command line: it is registered nowhere."""
        raise NotImplementedError

    def start(self, session: session.Session) -> None:
        """Nothing to prepare."""

    def create(
        self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], *, group: DeviceGroup | None, mesh: DeviceMesh | None,
    ) -> Any:
        """Return a handle on one object a rank."""
        mesh = mesh or self.mesh
        objects = [remote.build(cls, args, kwargs) for _ in range(mesh.world_size)]
        return remote.make_handle(cls, launcher=self, ref=(cls, objects, mesh))

    def call(self, handle: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], mark: remote.RemoteMark) -> Any:
        """Call every rank in turn and collect."""
        cls, objects, mesh = ref_of(handle)
        self.calls.append((cls.__name__, method))
        calls = dispatch(mark.dispatch, args, kwargs, mesh)
        if mark.execute == "first":
            rank_args, rank_kwargs = calls[0]
            return getattr(objects[0], method)(*rank_args, **rank_kwargs)
        results = [getattr(item, method)(*a, **k) for item, (a, k) in zip(objects, calls, strict=True)]
        return collect(mark.collect, results, mesh, dispatch=mark.dispatch)

    def topology(self) -> Topology:
        """Return rank 0 of 1: there is one process."""
        return Topology()
