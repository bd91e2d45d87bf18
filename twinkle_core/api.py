"""`initialize`: the one call that says how a run is arranged. A script on one device needs none."""

from collections.abc import Sequence
from typing import Any

from twinkle_core import session
from twinkle_core.mesh import DeviceGroup, DeviceMesh


def initialize(
    mode: str | None = None,
    *,
    global_device_mesh: DeviceMesh | None = None,
    nproc_per_node: int | None = None,
    groups: Sequence[DeviceGroup] | None = None,
    lazy_collect: bool = False,
    seed: int = session.DEFAULT_SEED,
    **options: Any,
) -> None:
    """Start the run, before the first component is built.

    Args:
        mode: launcher name. Left out: what the command line chose, else what the environment shows, else "local".
        global_device_mesh: arrangement of the ranks; its product must be the number of processes.
        nproc_per_node: ranks a node.
        groups: where components can be placed with `remote_group=`.
        lazy_collect: leave results where they are until looked at.
        seed: of everything that draws random numbers, from 0 to 2**63 - 1.
        options: of the launcher, the same as on its command line; every mode has `log_dir` and `plot`.

    Raises:
        ModeError: called twice, or the command line asks for something else.
        MeshError: the mesh does not fit the processes there are.
        ArgumentError: an option that the launcher does not have, or a value that is not allowed.
        ArgumentTypeError: an argument of a wrong type.
    """
    session.start(
        mode, mesh=global_device_mesh, nproc_per_node=nproc_per_node, groups=() if groups is None else groups,
        lazy_collect=lazy_collect, seed=seed, options=options)


def get_device_placement() -> str:
    """Return, for people: the groups and their ranks, the machines and devices these run on, and which component lives where."""
    return session.current().launcher.placement()


def shutdown() -> None:
    """End the run: write what trackers hold back, draw loss.png if asked for, stop workers. Called at exit by itself."""
    session.stop()
