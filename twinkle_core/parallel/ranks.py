"""The live process groups of a mesh, seen from this rank: what a model asks the other ranks.

Starting processes is the launcher's business, arranging ranks the mesh's. Here are the groups and the few collectives on plain
numbers that training needs. With one rank nothing is started and every collective is the identity.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from twinkle_core import session, settings
from twinkle_core.errors import MeshError, ModeError
from twinkle_core.mesh import AXES, DeviceMesh
from twinkle_core.platforms.choice import platform_of

DATA_AXES = ("dp", "fsdp")
"""Axes whose ranks see different data."""

T = TypeVar("T")


class Ranks:
    """The ranks of one component.

    Attributes:
        mesh: how they are arranged.
        rank: this process's number among them.
        coordinates: its position on every axis.
        torch_mesh: the same mesh as torch knows it, with the axes as dims; None with one rank.
    """

    def __init__(self, mesh: DeviceMesh | None, *, device: str) -> None:
        self.mesh = mesh or DeviceMesh()
        self.device_type = device.partition(":")[0]
        self.torch_mesh: Any = None
        self.rank = 0
        if self.mesh.world_size > 1:
            _start_process_group(self.mesh, device)
            self.rank = dist.get_rank()
            sizes = [getattr(self.mesh, axis) for axis in AXES]
            self.torch_mesh = dist.device_mesh.init_device_mesh(self.device_type, tuple(sizes), mesh_dim_names=AXES)
        self.coordinates = self.mesh.coordinates(self.rank)

    def size(self, *axes: str) -> int:
        """Return the number of ranks of a collective over `axes`."""
        return math.prod(getattr(self.mesh, axis) for axis in axes)

    def group(self, *axes: str) -> Any:
        """Return the process group of the ranks that differ from this one in `axes` only; None if that is this rank alone."""
        axes = tuple(axis for axis in AXES if axis in axes and getattr(self.mesh, axis) > 1)
        if not axes:
            return None
        if len(axes) == 1:
            return self.torch_mesh.get_group(axes[0])
        return self.torch_mesh[axes]._flatten("_".join(axes)).get_group()

    def sum_numbers(self, numbers: Sequence[float], *axes: str) -> list[float]:
        """Return the sums of several numbers over `axes`, in fp64, with one collective; bit for bit the same on every rank."""
        group = self.group(*axes)
        return list(numbers) if group is None else self._side_by_side(numbers, torch.float64, group).sum(0).tolist()

    def from_last_stage(self, numbers: Sequence[float], count: int) -> list[float]:
        """Return `numbers` of the last pipeline stage, `count` of them, on every stage."""
        group = self.group("pp")
        if group is None:
            return list(numbers)
        last = self.mesh.group_of(self.rank, "pp")[-1]
        own = list(numbers) if self.rank == last else [0.0] * count
        tensor = torch.tensor(own, dtype=torch.float32, device=self.device_type)
        dist.broadcast(tensor, src=last, group=group)
        return tensor.tolist()

    def union_of_stages(self, own: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
        """Return what all pipeline stages have, tensors and other values, by name; {} without `keep`. Every rank must call it."""
        group = self.group("pp")
        if group is None:
            return dict(own) if keep else {}
        column = self.mesh.group_of(self.rank, "pp")
        described = {name: (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value for name, value in own.items()}
        stages: list[dict[str, Any]] = [{} for _ in column]
        dist.all_gather_object(stages, described, group=group)
        union: dict[str, Any] = {}
        for owner, names in zip(column, stages, strict=True):
            for name, value in names.items():
                if name in union:
                    continue
                if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype):
                    tensor = own[name].to(self.device_type) if owner == self.rank else torch.empty(
                        value[0], dtype=value[1], device=self.device_type)
                    dist.broadcast(tensor, src=owner, group=group)
                    value = tensor.cpu() if keep else None
                union[name] = value
        return union if keep else {}

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in the order of the ranks."""
        if self.mesh.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.mesh.world_size
        dist.all_gather_object(values, value)
        return values

    def on_first(self, function: Callable[[], T]) -> T:
        """Call `function` on the first rank only, and return what it returned, or raise what it raised, on all."""
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = function()
            except Exception as error:  # noqa: BLE001  it is raised below, here and on every other rank
                outcome[1] = error
        if self.mesh.world_size > 1:
            dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def max_number(self, number: int, *axes: str) -> int:
        """Return the largest of the ranks' numbers over `axes`."""
        group = self.group(*axes)
        return number if group is None else int(self._side_by_side([number], torch.int64, group).max())

    def _side_by_side(self, numbers: Sequence[float], dtype: torch.dtype, group: Any) -> torch.Tensor:
        """Return every rank's numbers, [ranks, numbers]."""
        own = torch.tensor([list(numbers)], dtype=dtype, device=self.device_type)
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, own, group=group)
        return torch.cat(gathered)


def _start_process_group(mesh: DeviceMesh, device: str) -> None:
    """Join the other processes, once a process, with `device` as the one that this rank communicates from.

    Raises: `ModeError` outside a launcher that started several.
    """
    if dist.is_initialized():
        return
    place = settings.torchrun_rank()
    if place is None:
        raise ModeError(f"The mesh {mesh.factors()} needs {mesh.world_size} processes, and this is a single one. Start the script "
                        f"with `twinkle launch --mode torchrun --nproc-per-node {mesh.world_size}` or `torchrun`.")
    if mesh.world_size != place.world_size:
        raise MeshError(f"The mesh {mesh.factors()} has {mesh.world_size} ranks, torchrun started {place.world_size}.")
    # Restarted ranks share the agent's store with their predecessors: without a prefix gloo finds the dead ones' addresses.
    store, rank, world_size = next(iter(rendezvous("env://")))
    store = distributed_c10d.PrefixStore(f"restart_{place.restart}", store)
    own = None
    if not device.startswith("cpu"):  # tensors made without an index, and objects that are sent, go to the current device
        own = torch.device(device)
        torch.get_device_module(own).set_device(own)
    backend = platform_of(device).collective_backend
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=own)
    session.current().on_close(_leave, last=True)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
