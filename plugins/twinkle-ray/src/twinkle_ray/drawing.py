"""The text of `get_device_placement`: groups, their ranks on machines and devices, their meshes, and what lives where."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle_core.mesh import AXES, DeviceMesh
from twinkle_ray.group import ActorGroup
from twinkle_ray.messages import Component


def draw(groups: Mapping[str, ActorGroup], components: Sequence[Component], *, address: str) -> str:
    """Return the drawing, one line for each group, rank and component."""
    lines = [f"Ray cluster at {address}; the script runs in process 0 of 1 and holds handles."]
    for ranks in groups.values():
        lines.append(f"group {ranks.name}: {len(ranks.actors)} rank(s) on {ranks.group.device_type}")
        lines += [f"  rank {rank}: {_where(place)}" for rank, place in enumerate(ranks.places)]
        own = [component for component in components if component.group == ranks.name]
        lines += [f"  {component.cls.__name__} (number {component.number}): {_mesh(component.mesh)}" for component in own]
        if not own:
            lines.append("  no component yet")
    return "\n".join(lines)


def _where(place: Mapping[str, Any]) -> str:
    devices = "".join(f", {name} {', '.join(map(str, ids))}" for name, ids in place["devices"].items())
    return f"node {place['node'][:8]} ({place['host']}, {place['address']}), process {place['pid']}{devices}"


def _mesh(mesh: DeviceMesh) -> str:
    """Return the mesh and, where it has more than one axis, where each rank stands."""
    used = [axis for axis in AXES if getattr(mesh, axis) > 1]
    if len(used) < 2:
        return f"mesh {mesh}"
    places = (mesh.coordinates(rank) for rank in range(mesh.world_size))
    return f"mesh {mesh}; " + ", ".join(
        f"{rank}: " + " ".join(f"{axis} {place[axis]}" for axis in used) for rank, place in enumerate(places))
