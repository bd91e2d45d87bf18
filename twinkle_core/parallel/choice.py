"""Which strategies a mesh needs."""

from twinkle_core import registry
from twinkle_core.errors import MeshError, listing
from twinkle_core.mesh import AXES, DeviceMesh
from twinkle_core.parallel.interface import ParallelStrategy


def choose_strategies(mesh: DeviceMesh | None) -> list[ParallelStrategy]:
    """Return the strategy of each mesh axis that has more than one rank, from the outermost axis to the innermost.

    Raises: `MeshError` if none is installed for an axis.
    """
    strategies: list[ParallelStrategy] = []
    for axis in AXES:
        size = 1 if mesh is None else getattr(mesh, axis)
        if size == 1:
            continue
        installed = registry.names("parallel_strategies")
        if axis not in installed:
            raise MeshError(f"`{axis}_size={size}`: no parallel strategy for the mesh axis `{axis}` is installed. Installed: "
                            f"{listing(installed)}. Use a mesh of one rank, or install a plugin that brings it.")
        strategies.append(registry.resolve("parallel_strategies", axis)())
    return strategies
