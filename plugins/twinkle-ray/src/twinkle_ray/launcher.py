"""Mode `ray`: this process runs the script and holds handles; components live on groups of actors.

`start` joins or starts a cluster and starts the ranks of every group (`cluster`, `group`); `create` builds a component on each rank
of one; `call` cuts the arguments, sends them, and joins the results, at once or when they are looked at (`lazy`). What a rank does
with a call is left to `worker`.
"""

import dataclasses
import itertools
import sys
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinkle_core import remote, settings
from twinkle_core.dataloader import DataLoader, positions
from twinkle_core.errors import ArgumentError, MeshError, ModeError, WorkerError, listing
from twinkle_core.launchers.interface import Launcher, LauncherOption, Topology
from twinkle_core.launchers.local import LocalLauncher
from twinkle_core.launchers.script import check_script
from twinkle_core.mesh import AUTO, DeviceGroup, DeviceMesh
from twinkle_core.remote import RemoteMark
from twinkle_core.remote.handle import ref_of
from twinkle_core.session import Session
from twinkle_core.settings import LaunchRequest, ProcessRank

_TRAVEL = ("TWINKLE_",)  # variables that every rank gets as they are here
_DEFAULTS = ("HF_", "MODELSCOPE_", "TRANSFORMERS_")  # variables that a machine may set for itself
DEFAULT_GROUP = "ranks"


class RayLauncher(Launcher):
    """Places components on a Ray cluster."""

    options = (
        LauncherOption(name="address", type=str,
                       help="Cluster to join, HOST:PORT. Default: RAY_ADDRESS, else one that runs here, else a new one."),
        LauncherOption(name="max_restarts", type=int, help="How often the script is run again after it failed.", default=0),
        LauncherOption(name="submit", type=bool, default=False,
                       help="Run the script as a job of the cluster whose dashboard is at --address http://HOST:8265."),
    )
    accepts = frozenset({"nproc_per_node", "mesh", "group"})

    @classmethod
    def launch(cls, script: str | None, argv: Sequence[str], request: LaunchRequest) -> int:
        """Run `script` in this process, which then controls the cluster; in processes that can be run again; or as a job."""
        path = check_script(script)
        values = cls.check_options(request.options, where="twinkle launch --mode ray")
        restarts, is_job = values["max_restarts"], values["submit"]
        if restarts < 0:
            raise ArgumentError(f"`--max-restarts {restarts}`: use an integer >= 0.")
        mine = {"max_restarts", "submit", "address"} if is_job else {"max_restarts", "submit"}
        child = dataclasses.replace(
            request, mode="ray", options={name: value for name, value in request.options.items() if name not in mine})
        if is_job:
            from twinkle_ray.submit import submit

            return submit(path, argv, child, address=values["address"], restarts=restarts)
        if restarts:
            from twinkle_ray.attempt import run_again

            settings.update_environ(child.to_environ())
            return run_again(restarts, path, argv)
        return LocalLauncher.launch(path, argv, child)

    def start(self, session: Session) -> None:
        """Join or start a cluster, and start the ranks of every group."""
        from twinkle_ray import cluster

        for name in ("max_restarts", "submit"):
            if self.values[name]:
                raise ModeError(f"`initialize({name}={self.values[name]!r})` comes too late: the script runs already. Say "
                                f"`--{name.replace('_', '-')}` to `twinkle launch --mode ray`.")
        self._session = session
        self._groups: dict[str, Any] = {}
        self._reserved: list[Any] = []
        self._components: dict[int, tuple[Any, Any]] = {}
        self._numbers = itertools.count(1)
        self._travelled: set[int] = set()
        session.groups = _default_groups(session, self.nproc_per_node)
        if session.mesh is not None and session.mesh.world_size not in {group.world_size for group in session.groups.values()}:
            raise MeshError(f"The mesh {session.mesh.factors()} has {session.mesh.world_size} ranks, but no group has so many: "
                            f"{_sizes(session.groups)}. Choose sizes whose product is a group's number of ranks.")
        cluster.check_ranks(list(session.groups.values()))
        self._is_connected = cluster.connect(self.values["address"], list(session.groups.values()))
        try:
            session.groups = {name: _with_device(group) for name, group in session.groups.items()}
            self._start_groups(list(session.groups.values()))
        except BaseException:
            self.shutdown()
            raise

    def create(
        self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], *, group: DeviceGroup | None, mesh: DeviceMesh | None,
    ) -> Any:
        """Build the component on every rank of its group and return a handle; here, if it stays with the script."""
        from twinkle_ray.messages import Component, Site

        if group is None and getattr(cls, "stays_with_script", False):
            return remote.build(cls, args, kwargs)
        chosen = group or self._only_group(cls)
        if mesh is not None:
            mesh.check_world_size(chosen.world_size, where=f"group `{chosen.name}`")
        component = Component(next(self._numbers), cls, chosen.name, mesh or self._mesh_of(chosen))
        ranks = self._groups[chosen.name]
        ranks.create(component.number, cls, args, kwargs, site=Site.here())
        handle = remote.make_handle(cls, launcher=self, ref=component)
        weakref.finalize(handle, self._drop, component).atexit = False
        self._components[component.number] = (component, weakref.ref(handle))
        if issubclass(cls, DataLoader):
            positions.register(handle)
        return handle

    def call(self, handle: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], mark: RemoteMark) -> Any:
        """Call the ranks and return what is collected of their results, or a lazy stand-in for it."""
        from twinkle_ray.calls import call_group

        component = ref_of(handle)
        states = positions.collect_states() if mark.with_data_state else None
        return call_group(self._groups[component.group], component, method, args, kwargs, mark, data_states=states,
                          leaves_results=self._session.lazy_collect if mark.lazy_collect is None else mark.lazy_collect)

    def topology(self) -> Topology:
        """Return rank 0 of 1: the script is one process, and sees whole batches."""
        return Topology()

    def placement(self) -> str:
        """Return a drawing of the groups and what lives on them."""
        import ray

        from twinkle_ray.drawing import draw

        living = [component for component, handle in self._components.values() if handle() is not None]
        return draw(self._groups, living, address=ray.get_runtime_context().gcs_address)

    def reduce(self, handle: Any) -> tuple[Any, ...]:
        """Return what makes it the object itself on a rank of its group, and a handle elsewhere. It is then kept to the end."""
        from twinkle_ray.peers import open_handle

        component = ref_of(handle)
        self._travelled.add(component.number)
        return open_handle, (component, self._groups[component.group])

    def shutdown(self) -> None:
        """Stop the ranks, give back what they took, and end the cluster if it was started here."""
        import ray

        from twinkle_ray import cluster

        if not ray.is_initialized():
            return
        try:
            if getattr(sys, "last_value", None) is None:  # no error ends the script, so what it has asked for is done
                for ranks in self._groups.values():
                    ranks.finish()
        finally:
            for ranks in self._groups.values():
                ranks.stop(timeout_s=5)
            cluster.release(self._reserved)
            self._groups, self._reserved = {}, []
            if self._is_connected:
                ray.shutdown()

    def _start_groups(self, groups: list[DeviceGroup]) -> None:
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from twinkle_ray import cluster
        from twinkle_ray.group import ActorGroup
        from twinkle_ray.worker import Rank

        placed = cluster.place(groups, nproc_per_node=self.nproc_per_node)
        self._reserved = [reserved for reserved, _ in placed.values()]
        told: set[Any] = set()
        for group in groups:
            reserved, _ = placed[group.name]
            needs = cluster.resources(group)
            cpus, gpus = needs.pop("CPU", 0), needs.pop("GPU", 0)
            actors = [
                ray.remote(Rank).options(
                    num_cpus=cpus, num_gpus=gpus, resources=needs, max_restarts=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=rank),
                ).remote(f"{group.name} rank {rank}")
                for rank in range(group.world_size)]
            self._groups[group.name] = ActorGroup(group, actors, [], told=told)
        try:
            for ranks in self._groups.values():
                ranks.places = ray.get([actor.where.remote() for actor in ranks.actors])
            ray.get([started for ranks in self._groups.values() for started in self._setup(ranks)])
        except RayError as error:
            raise WorkerError(f"A rank could not be started: {str(error).strip()}\nInstall the same versions of Twinkle and its "
                              "plugins on every machine of the cluster.") from error

    def _setup(self, ranks: Any) -> list[Any]:
        """Tell the ranks of a group their places."""
        import ray

        from twinkle_ray.messages import RankSetup

        port: Any = ray.get(ranks.actors[0].reserve_port.remote())
        run_id = uuid.uuid4().hex
        started = []
        for rank, (actor, place) in enumerate(zip(ranks.actors, ranks.places, strict=True)):
            # Ray shows a rank its own devices only, and torch takes LOCAL_RANK as the number of a device that it sees.
            local_rank = 0 if place["devices"] else sum(other["node"] == place["node"] for other in ranks.places[:rank])
            started.append(actor.start.remote(RankSetup(
                group=ranks.name, place=ProcessRank(rank, local_rank, len(ranks.actors)), run_id=run_id,
                master=(ranks.places[0]["address"], port), device_type=ranks.group.device_type, mesh=self._mesh_of(ranks.group),
                groups=self._session.groups, seed=self._session.seed, environ=_environ(ranks.group),
                defaults=_starting_with(_DEFAULTS), path=[folder for folder in sys.path if folder], folder=str(Path.cwd()))))
        return started

    def _mesh_of(self, group: DeviceGroup) -> DeviceMesh:
        mesh = self._session.mesh
        fits = mesh is not None and mesh.world_size == group.world_size
        return mesh if fits else DeviceMesh.from_sizes(dp_size=group.world_size)  # type: ignore[return-value]

    def _only_group(self, cls: type) -> DeviceGroup:
        groups = self._session.groups
        if len(groups) > 1:
            raise ArgumentError(f"`{cls.__name__}(...)` does not say where it lives, and there are several groups: "
                                f"{listing(groups)}. Say one: `{cls.__name__}(..., remote_group={next(iter(groups))!r})`.")
        return next(iter(groups.values()))

    def _drop(self, component: Any) -> None:
        self._components.pop(component.number, None)
        ranks = self._groups.get(component.group)
        if ranks is not None and component.number not in self._travelled and ranks.failure is None:
            for actor in ranks.actors:
                actor.drop.remote(component.number)


def _default_groups(session: Session, nproc_per_node: int | None) -> dict[str, DeviceGroup]:
    """Return the groups of the run: those declared, or one for everything."""
    if session.groups:
        return dict(session.groups)
    ranks = session.mesh.world_size if session.mesh is not None else nproc_per_node or 1
    return {DEFAULT_GROUP: DeviceGroup(name=DEFAULT_GROUP, ranks=ranks, device_type=AUTO)}


def _with_device(group: DeviceGroup) -> DeviceGroup:
    """Return a group that nobody gave a device type on GPUs, if the cluster has one a rank, else on CPUs."""
    from twinkle_ray import cluster

    if group.device_type != AUTO:
        return group
    gpus = sum(node.total.get("GPU", 0) for node in cluster.nodes())
    return DeviceGroup(name=group.name, ranks=group.ranks, device_type="cuda" if gpus >= group.world_size else "cpu")


def _environ(group: DeviceGroup) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": settings.environ().get("OMP_NUM_THREADS", "1")} if group.device_type == "cpu" else {}
    return _starting_with(_TRAVEL) | threads


def _starting_with(prefixes: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in settings.environ().items() if name.startswith(prefixes)}


def _sizes(groups: dict[str, DeviceGroup]) -> str:
    return ", ".join(f"`{name}` {group.world_size}" for name, group in groups.items())
