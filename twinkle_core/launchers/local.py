"""Mode `local`: this process, or one process a rank that torchrun started. A component is the object itself."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle_core import remote, settings
from twinkle_core.errors import ModeError
from twinkle_core.launchers.interface import Launcher, Topology
from twinkle_core.launchers.script import check_script, end_on_sigterm, run_script
from twinkle_core.mesh import DeviceGroup, DeviceMesh
from twinkle_core.session import Session
from twinkle_core.settings import LaunchRequest


class LocalLauncher(Launcher):
    """Runs the script in this process."""

    @classmethod
    def launch(cls, script: str | None, argv: Sequence[str], request: LaunchRequest) -> int:
        """Run `script` in this process, as `python script` does."""
        script = check_script(script)
        settings.update_environ(request.to_environ())
        end_on_sigterm()
        return run_script(script, argv)

    def start(self, session: Session) -> None:
        """Check the mesh against the processes there are; under torchrun without a mesh, all of them are `dp`."""
        rank = settings.torchrun_rank()
        self._topology = Topology() if rank is None else Topology(
            rank=rank.rank, local_rank=rank.local_rank, world_size=rank.world_size)
        if self.nproc_per_node not in (None, 1) and rank is None:
            raise ModeError(f"`nproc_per_node={self.nproc_per_node}`: mode `local` is this one process. Start the script with "
                            f"`torchrun --nproc-per-node {self.nproc_per_node}`, or choose another mode.")
        world_size = self._topology.world_size
        if session.mesh is not None:
            session.mesh.check_world_size(world_size, where="this run (mode `local`, one process)" if rank is None else "torchrun")
        elif rank is not None:
            session.mesh = DeviceMesh.from_sizes(dp_size=world_size)

    def create(
        self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], *, group: DeviceGroup | None, mesh: DeviceMesh | None,
    ) -> Any:
        """Build the object here. Groups share this process, so a component's mesh must fit it."""
        if mesh is not None:
            mesh.check_world_size(self._topology.world_size, where="mode `local`")
        return remote.build(cls, args, kwargs)

    def call(self, handle: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], mark: remote.RemoteMark) -> Any:
        """Never needed: a component is the object, and its methods are its own."""
        raise ModeError(f"`{method}` was called through a handle, but mode `local` makes none.")

    def topology(self) -> Topology:
        """Return the rank that torchrun gave, or rank 0 of 1."""
        return self._topology


def detect(environ: Mapping[str, str]) -> str | None:
    """Return "local" in a process that torchrun started: it is one rank of an SPMD run."""
    return "local" if "TORCHELASTIC_RUN_ID" in environ else None
