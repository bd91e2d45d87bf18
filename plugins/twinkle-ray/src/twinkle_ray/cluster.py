"""Ray clusters: joining or starting one, what its machines have, and on which of them the ranks of the groups go.

Placing is arithmetic over what the machines have free (`assign`); each group then gets a placement group whose bundles name their
machines. So asking for too much is known at once, and no run holds a part of what it needs while it waits for the rest.
"""

import contextlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private import services, state
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from twinkle_core import settings
from twinkle_core.errors import ArgumentError, MeshError, ModeError, first_line
from twinkle_core.mesh import AUTO, DeviceGroup

_RESOURCES = {"cpu": "CPU", "cuda": "GPU"}
_WAIT_S = 7.0  # for what an earlier run is about to free
_ATTEMPTS = 2  # Ray 2.60 gives its raylet 30 s to come up, which a busy machine may exceed
_QUIET = 40  # ERROR of the `logging` module


@dataclass(kw_only=True)
class Node:
    """A machine of the cluster.

    Attributes:
        id: Ray's name for it.
        address: where it is reached.
        total: resource -> how much it has.
        free: resource -> how much of it is not taken.
        ranks: how many of this run's ranks are assigned to it.
    """

    id: str
    address: str
    total: dict[str, float]
    free: dict[str, float]
    ranks: int = field(default=0)


class ShortageError(Exception):
    """A group does not fit. `group` is the one, `room` how many of its ranks would."""

    def __init__(self, group: DeviceGroup, room: int) -> None:
        super().__init__(group.name)
        self.group = group
        self.room = room


def connect(address: str | None, groups: Sequence[DeviceGroup]) -> bool:
    """Join the cluster at `address`, or one that runs here, or start one with room for `groups`.

    Returns False if this process was connected already, by the script itself.

    Raises: `ModeError` if no cluster answers at an address that was said, or this process is connected to another one.
    """
    if ray.is_initialized():
        present = ray.get_runtime_context().gcs_address
        if address not in (None, present):
            raise ModeError(f"`address={address!r}`: this process is connected to the Ray cluster at `{present}` already. Leave "
                            "`address` out, or do not call `ray.init` in the script.")
        return False
    said = address or settings.environ().get("RAY_ADDRESS")
    found = said or services.find_bootstrap_address(None)  # what the last `ray start` on this machine noted
    if said is None and (found is None or not _listens(found)):
        start_local(max(1, sum(group.world_size for group in groups if group.device_type in ("cpu", AUTO))))
    elif found is not None:
        _join(said, found)
    return True


def _join(said: str | None, address: str) -> None:
    """Join the cluster at `address`. Ray itself is given what was said only: it uses this machine's token for one that it finds."""
    if not _listens(address):
        raise ModeError(f"No Ray cluster answers at `{address}`. Start one there with `ray start --head`, or say the HOST:PORT "
                        "that it printed with `--address`.")
    try:
        ray.init(address=said, logging_level=_QUIET, log_to_driver=True)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise ModeError(f"The Ray cluster at `{address}` cannot be joined: {first_line(error)} This machine must be one of the "
                        "cluster's, with the same versions of Ray and Python; if the cluster wants a token, set "
                        "RAY_AUTH_MODE=token. To run elsewhere, use `--submit`.") from error


def start_local(slots: int) -> None:
    """Start a cluster on this machine with `slots` CPU slots and the GPUs there are, and join it. It ends with this process.

    Raises: `ModeError` if it does not come up.
    """
    settings.set_defaults({"RAY_USAGE_STATS_ENABLED": "0"})  # a training run is nobody's news
    for attempt in range(_ATTEMPTS):
        try:
            ray.init(address="local", num_cpus=slots, include_dashboard=False, logging_level=_QUIET, log_to_driver=True)
            return
        except Exception as error:  # Ray raises bare `Exception` when its processes do not come up
            ray.shutdown()
            if attempt == _ATTEMPTS - 1:
                raise ModeError(f"Ray could not be started on this machine: {first_line(error)} Its own logs are in /tmp/ray/"
                                "session_latest/logs. If the machine was busy, try again.") from error


def nodes() -> list[Node]:
    """Return the machines that are alive."""
    free = state.available_resources_per_node()
    return [Node(id=node["NodeID"], address=node["NodeManagerAddress"], total=dict(node["Resources"]),
                 free=dict(free.get(node["NodeID"], {})))
            for node in ray.nodes() if node["Alive"]]


def resources(group: DeviceGroup) -> dict[str, float]:
    """Return what one rank of a group takes: a CPU, or its devices and no CPU."""
    if group.device_type == "cpu":
        return {"CPU": 1}
    return {_RESOURCES.get(group.device_type, group.device_type.upper()): group.gpus_per_worker}


def assign(groups: Sequence[DeviceGroup], machines: Sequence[Node], *, nproc_per_node: int | None) -> dict[str, list[str]]:
    """Return group -> the machine of each of its ranks. A group goes on one machine where one has room, else on as few as can be.

    `machines` are counted down. Raises: `ShortageError`.
    """
    placed: dict[str, list[str]] = {}
    for group in groups:
        (resource, amount), = resources(group).items()

        def room(node: Node, resource: str = resource, amount: float = amount) -> int:
            most = int(node.free.get(resource, 0) / amount)
            return most if nproc_per_node is None else min(most, nproc_per_node - node.ranks)

        whole = [node for node in machines if room(node) >= group.world_size]
        chosen = [min(whole, key=room)] if whole else sorted(machines, key=room, reverse=True)
        left = group.world_size
        placed[group.name] = []
        for node in chosen:
            taken = min(left, room(node))
            placed[group.name] += [node.id] * taken
            node.free[resource] = node.free.get(resource, 0) - taken * amount
            node.ranks += taken
            left -= taken
        if left:
            raise ShortageError(group, group.world_size - left)
    return placed


def place(
    groups: Sequence[DeviceGroup], *, nproc_per_node: int | None,
) -> dict[str, tuple[PlacementGroup, list[str]]]:
    """Return group -> its placement group, which is ready, and the machine of each rank.

    Raises: `MeshError` within 10 s if the groups do not fit: what is asked, what there is, which group to shrink.
    """
    empty = [Node(id=node.id, address=node.address, total=node.total, free=dict(node.total)) for node in nodes()]
    _assign_or_explain(groups, empty, nproc_per_node)
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            placed = assign(groups, nodes(), nproc_per_node=nproc_per_node)
            break
        except ShortageError:
            if time.monotonic() > deadline:
                placed = _assign_or_explain(groups, nodes(), nproc_per_node)
                break
            time.sleep(0.2)
    made: dict[str, tuple[PlacementGroup, list[str]]] = {}
    try:
        for group in groups:
            where = placed[group.name]
            reserved = placement_group(
                [resources(group) for _ in where], strategy="PACK", name=f"twinkle-{group.name}-{os.getpid()}",
                bundle_label_selector=[{"ray.io/node-id": node} for node in where])
            made[group.name] = (reserved, where)
            if not reserved.wait(max(1.0, deadline - time.monotonic())):
                raise MeshError(_explain(ShortageError(group, 0), groups, nproc_per_node))
    except BaseException:
        release(reserved for reserved, _ in made.values())
        raise
    return made


def release(reserved: Any) -> None:
    """Give placement groups back."""
    for one in reserved:
        with contextlib.suppress(RayError):
            remove_placement_group(one)


def check_ranks(groups: Sequence[DeviceGroup]) -> None:
    """Raise `ArgumentError` if two groups claim the same rank numbers."""
    owners: dict[int, str] = {}
    for group in groups:
        for rank in group.ranks if isinstance(group.ranks, list) else ():
            if rank in owners:
                raise ArgumentError(f"Rank {rank} is in the groups `{owners[rank]}` and `{group.name}`. Use different ranks, or "
                                    f"put both components on one group: `remote_group={owners[rank]!r}`.")
            owners[rank] = group.name


def _assign_or_explain(groups: Sequence[DeviceGroup], machines: Sequence[Node], nproc_per_node: int | None) -> dict[str, list[str]]:
    try:
        return assign(groups, machines, nproc_per_node=nproc_per_node)
    except ShortageError as shortage:
        raise MeshError(_explain(shortage, groups, nproc_per_node)) from None


def _explain(shortage: ShortageError, groups: Sequence[DeviceGroup], nproc_per_node: int | None) -> str:
    asked = ", ".join(f"`{group.name}` {group.world_size} rank(s) of {_amount(resources(group))}" for group in groups)
    kinds = sorted({name for group in groups for name in resources(group)})
    has = "; ".join(f"{node.address}: " + ", ".join(f"{node.free.get(kind, 0):g} of {node.total.get(kind, 0):g} {kind} free"
                                                    for kind in kinds) for node in nodes())
    most = "" if nproc_per_node is None else f" A machine takes {nproc_per_node} ranks at most (`nproc_per_node`)."
    group = shortage.group
    remedy = f"Shrink it to {shortage.room}" if shortage.room else "Leave it out, or shrink the groups before it"
    return (f"Group `{group.name}` does not fit: of its {group.world_size} ranks there is room for {shortage.room}. Asked: "
            f"{asked}. The cluster has: {has}.{most} {remedy}, use a larger cluster, or wait until other runs have ended.")


def _amount(needs: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in needs.items())


def _listens(address: str) -> bool:
    """Whether something listens at HOST:PORT. Raises: `ArgumentError` for an address of another form."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise ArgumentError(f"`address={address!r}` is not of the form HOST:PORT, as `ray start --head` prints it. To send the "
                            "script to a cluster at http://HOST:8265, add `--submit`.")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=3):
        return True
    return False
