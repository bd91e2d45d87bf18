"""Which strategies a mesh needs, and the order in which they are applied."""

from typing import Any

from twinkle_core import registry
from twinkle_core.errors import MeshError, listing
from twinkle_core.mesh import DeviceMesh
from twinkle_core.parallel.interface import ParallelStrategy
from twinkle_core.parallel.placed import Placed

ORDER = ("pp", "tp", "fsdp", "dp")
"""pp cuts first, so that the others see only what stays. tp cuts single matrices, which fsdp then shards as they are; dp wraps the
whole, or leaves its reduction to fsdp or to the step."""


def choose_strategies(mesh: DeviceMesh | None) -> dict[str, ParallelStrategy]:
    """Return axis -> strategy for each mesh axis that has more than one rank, in the order of application.

    Raises: `MeshError` if none is installed for an axis, or for a product of axes that is not held against one device by a test.
    """
    strategies: dict[str, ParallelStrategy] = {}
    if mesh is not None:
        _check_product(mesh)
    for axis in ORDER:
        size = 1 if mesh is None else getattr(mesh, axis)
        if size == 1:
            continue
        installed = registry.names("parallel_strategies")
        if axis not in installed:
            raise MeshError(f"`{axis}_size={size}`: no parallel strategy for the mesh axis `{axis}` is installed. Installed: "
                            f"{listing(installed)}. Use a mesh of one rank, or install a plugin that brings it.")
        strategies[axis] = registry.resolve("parallel_strategies", axis)()
    return strategies


def _check_product(mesh: DeviceMesh) -> None:
    used = [axis for axis in ORDER if getattr(mesh, axis) > 1]
    if len(used) == len(ORDER):
        raise MeshError(f"The mesh {mesh.factors()} uses all of {listing(ORDER)} at once, which is not tested. Use three of them: "
                        "leave out `dp` where `fsdp` has room for its ranks.")
    if mesh.vpp > 1 and used != ["pp"]:
        raise MeshError(f"`vpp={mesh.vpp}` with the mesh {mesh.factors()}: several chunks of layers a rank are tested with `pp` "
                        f"alone. Leave `vpp` out, or {listing(axis for axis in used if axis != 'pp')}.")


def parallelize(placed: Placed, strategies: dict[str, ParallelStrategy], *, gradient_checkpointing: bool) -> None:
    """Apply the strategies to a module whose adapters are in it already, and turn activation checkpointing on between."""
    for axis in ("pp", "tp"):
        if axis in strategies:
            strategies[axis].apply(placed)
    if gradient_checkpointing:  # after tp, so that what is computed again communicates; before fsdp, so that it is gathered again
        placed.module.gradient_checkpointing_enable({"use_reentrant": False})
    for axis in ("fsdp", "dp"):
        if axis in strategies:
            strategies[axis].apply(placed)


def check_model(config: Any, mesh: DeviceMesh | None, strategies: dict[str, ParallelStrategy]) -> None:
    """Raise `MeshError` if a model of this configuration does not fit the mesh, before any process waits for another."""
    for strategy in strategies.values():
        strategy.check(config, mesh or DeviceMesh())
