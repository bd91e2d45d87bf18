"""How ranks are arranged: `DeviceMesh` (the axes of parallelism) and `DeviceGroup` (a named set of ranks).

Pure arithmetic, without torch and without processes. Ranks are numbered with `pp` outermost, then `dp`, `fsdp`, `cp`, and `tp`
innermost, so that the ranks which talk most are neighbours. Turning a mesh into process groups is left to `parallel`.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

from twinkle_core.errors import ArgumentError, ArgumentTypeError, MeshError, did_you_mean, listing

AXES = ("pp", "dp", "fsdp", "cp", "ep", "tp")
"""Mesh axes from the outermost to the innermost."""

AUTO = "auto"
"""Device type of a group that only the command line names: the launcher takes the best there is."""

NOT_BUILT = {"cp": "context parallelism", "ep": "expert parallelism"}


@dataclass(frozen=True, kw_only=True)
class DeviceMesh:
    """Sizes of the parallel axes; build one with `from_sizes` or `parse`. Their product is the number of ranks.

    Attributes:
        pp: pipeline stages.
        dp: replicas of the model; each sees its own data.
        fsdp: ranks over which one replica's parameters are sharded; each sees its own data.
        cp: ranks that share one sequence.
        ep: ranks over which experts are spread.
        tp: ranks over which single matrices are sharded; all see the same data.
        vpp: layer chunks a pipeline rank holds. It adds no ranks.
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    vpp: int = 1

    OPTIONS: ClassVar[tuple[str, ...]] = (*AXES, "vpp")

    def __post_init__(self) -> None:
        for name in self.OPTIONS:
            size: object = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise MeshError(f"`{name}_size={size!r}` is not a size. Use an integer >= 1.")
        for name, what in NOT_BUILT.items():
            if getattr(self, name) > 1:
                raise MeshError(
                    f"`{name}_size={getattr(self, name)}`: {what} (`{name}`) is not built yet. Leave `{name}_size` out.")
        if self.vpp > 1 and self.pp == 1:
            raise MeshError(f"`vpp_size={self.vpp}` needs `pp_size` > 1: it is the number of layer chunks a pipeline rank holds.")

    @classmethod
    def from_sizes(
        cls,
        *,
        world_size: int | None = None,
        pp_size: int | None = None,
        dp_size: int | None = None,
        fsdp_size: int | None = None,
        cp_size: int | None = None,
        tp_size: int | None = None,
        ep_size: int | None = None,
        vpp_size: int | None = None,
    ) -> "DeviceMesh":
        """Return the mesh of these sizes. A size left out is 1; only `world_size` given means that all of it is `dp`.

        Raises: `MeshError` if `world_size` is not the product of the sizes (without `vpp_size`), or an axis is not built yet.
        """
        given = {"pp": pp_size, "dp": dp_size, "fsdp": fsdp_size, "cp": cp_size, "tp": tp_size, "ep": ep_size, "vpp": vpp_size}
        if world_size is not None and all(size is None for size in given.values()):
            given["dp"] = world_size
        mesh = cls(**{name: size for name, size in given.items() if size is not None})
        if world_size is not None and world_size != mesh.world_size:
            raise MeshError(
                f"`world_size={world_size}` is not the product of the sizes {mesh.factors()} = {mesh.world_size}. "
                "Change a size, or leave `world_size` out.")
        return mesh

    @classmethod
    def parse(cls, text: str) -> "DeviceMesh":
        """Return the mesh written as on the command line: "fsdp=4,dp=2"."""
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, equals, size = (piece.strip() for piece in part.partition("="))
            if not equals or not size.isdecimal():
                raise MeshError(f"`{part.strip()}` in the mesh `{text}` is not of the form axis=size, as in `fsdp=4,dp=2`.")
            if name not in cls.OPTIONS:
                raise MeshError(f"`{name}` in the mesh `{text}` is not an axis.{did_you_mean(name, cls.OPTIONS)} "
                                f"Axes: {listing(cls.OPTIONS)}.")
            if name in sizes:
                raise MeshError(f"`{name}` stands twice in the mesh `{text}`. Give each axis one size.")
            sizes[name] = int(size)
        return cls(**sizes)

    def __str__(self) -> str:
        return ",".join(f"{name}={getattr(self, name)}" for name in self.OPTIONS if getattr(self, name) > 1) or "dp=1"

    def factors(self) -> str:
        """Return every factor of the world size: "pp 1 x dp 2 x fsdp 4 x cp 1 x ep 1 x tp 1"."""
        return " x ".join(f"{name} {getattr(self, name)}" for name in AXES)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(getattr(self, name) for name in AXES)

    @property
    def data_world_size(self) -> int:
        """The number of ranks that see different data: dp x fsdp."""
        return self.dp * self.fsdp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of `rank` on every axis."""
        self._check_rank(rank)
        position: dict[str, int] = {}
        for name in reversed(AXES):
            rank, position[name] = divmod(rank, getattr(self, name))
        return {name: position[name] for name in AXES}

    def rank(self, **coordinates: int) -> int:
        """Return the rank at these coordinates; an axis left out is 0."""
        number = 0
        for name in AXES:
            size, position = getattr(self, name), coordinates.pop(name, 0)
            if not 0 <= position < size:
                raise MeshError(f"`{name}={position}` is outside the mesh {self.factors()}. Use 0 to {size - 1}.")
            number = number * size + position
        if coordinates:
            name = next(iter(coordinates))
            raise MeshError(f"`{name}` is not an axis.{did_you_mean(name, AXES)} Axes: {listing(AXES)}.")
        return number

    def data_rank(self, rank: int) -> int:
        """Return which slice of the data `rank` sees: its (dp, fsdp) coordinates in that order, 0 to data_world_size - 1."""
        position = self.coordinates(rank)
        return position["dp"] * self.fsdp + position["fsdp"]

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """Return the ranks, in order, that differ from `rank` in `axes` only: the ranks of a collective over `axes`."""
        position = self.coordinates(rank)
        ranges = [range(getattr(self, name)) if name in axes else (position[name],) for name in AXES]
        return [self.rank(**dict(zip(AXES, point, strict=True))) for point in itertools.product(*ranges)]

    def is_last_stage(self, rank: int) -> bool:
        """Whether `rank` holds the last pipeline stage, where the loss is."""
        return self.coordinates(rank)["pp"] == self.pp - 1

    def data_representatives(self) -> list[int]:
        """Return one rank for each slice of the data, in the order of the slices: last stage, first on the other axes."""
        return [self.rank(pp=self.pp - 1, dp=dp, fsdp=fsdp) for dp in range(self.dp) for fsdp in range(self.fsdp)]

    def check_world_size(self, world_size: int, *, where: str) -> None:
        """Raise `MeshError` unless the mesh has `world_size` ranks. `where` says whose number it is."""
        if self.world_size != world_size:
            raise MeshError(
                f"The mesh {self.factors()} has {self.world_size} ranks, but {where} has {world_size}. "
                f"Start {self.world_size} processes, or choose sizes whose product is {world_size}.")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise MeshError(f"`rank={rank}` is outside the mesh {self.factors()}. Use 0 to {self.world_size - 1}.")


@dataclass(frozen=True)
class DeviceGroup:
    """A named set of ranks on which components are placed with `remote_group=name`.

    Attributes:
        name: what components say.
        ranks: how many, or the list of their numbers in the cluster.
        device_type: "cpu", "cuda", or what an installed platform plugin registers. A CPU rank is a slot, not a core.
        gpus_per_worker: devices that one rank sees; ignored for "cpu".
    """

    name: str
    ranks: int | list[int]
    device_type: Literal["cpu", "cuda"] | str
    gpus_per_worker: int = 1

    def __post_init__(self) -> None:
        self._check_types()
        if not self.name:
            raise ArgumentError("`DeviceGroup(name='')`: give the group a name that `remote_group=` can say.")
        if isinstance(self.ranks, int):
            if self.ranks < 1:
                raise ArgumentError(f"`DeviceGroup({self.name!r}, ranks={self.ranks})`: use at least 1 rank.")
        elif not self.ranks or len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise ArgumentError(
                f"`DeviceGroup({self.name!r}, ranks={self.ranks})`: use a count, or different rank numbers >= 0.")
        if self.gpus_per_worker < 1:
            raise ArgumentError(f"`DeviceGroup({self.name!r}, gpus_per_worker={self.gpus_per_worker})`: use at least 1.")

    def _check_types(self) -> None:
        ranks: Any = self.ranks
        given: list[Any] = [self.gpus_per_worker, *(ranks if isinstance(ranks, list | tuple) else [ranks])]
        are_texts = all(isinstance(text, str) for text in cast("list[Any]", [self.name, self.device_type]))
        if not are_texts or not all(isinstance(number, int) and not isinstance(number, bool) for number in given):
            raise ArgumentTypeError(
                f"`{self}`: a name and a device type are strings, `ranks` is a count or a list of rank numbers, `gpus_per_worker` "
                "a count. Write it as in `DeviceGroup(name=\"model\", ranks=2, device_type=\"cuda\")`.")

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.ranks if isinstance(self.ranks, int) else len(self.ranks)
