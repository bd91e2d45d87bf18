"""The state of a run: which launcher is active, the mesh, the groups, the seed, and the numbers last reported.

There is one session a process. `start` makes it (through `twinkle.initialize`), `current` returns it and starts a default one
when a component is built before anything was said. The session knows launchers by their interface only; their names come from
the registry.
"""

import atexit
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twinkle_core import plugins, registry, settings
from twinkle_core.errors import ArgumentError, MeshError, ModeError, did_you_mean, listing
from twinkle_core.mesh import DeviceGroup, DeviceMesh

if TYPE_CHECKING:
    from twinkle_core.launchers.interface import Launcher

DEFAULT_SEED = 42


@dataclass(kw_only=True)
class Session:
    """One run in one process.

    Attributes:
        mode: name of the launcher.
        launcher: creates components and calls their methods.
        mesh: how the ranks of this run are arranged, or None where nothing said so (then a model is whole).
        groups: name -> ranks on which components can be placed.
        seed: of everything that draws random numbers.
        lazy_collect: whether results stay where they are until looked at.
        options: the launcher's own options, checked.
        latest_metrics: what `calculate_metric` reported last in this process.
        state: what plugins keep for the length of the run, under keys of their own.
    """

    mode: str
    launcher: "Launcher"
    mesh: DeviceMesh | None = None
    groups: dict[str, DeviceGroup] = field(default_factory=lambda: dict[str, DeviceGroup]())
    seed: int = DEFAULT_SEED
    lazy_collect: bool = False
    options: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    latest_metrics: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    state: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    _closers: list[Callable[[], None]] = field(default_factory=lambda: list[Callable[[], None]]())

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the session ends; the last registered is called first."""
        self._closers.append(callback)

    def report_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand the numbers of a step to the progress bar and to the trackers, on the first rank only."""
        self.latest_metrics = dict(metrics)
        if self.launcher.topology().rank == 0:
            plugins.log_metrics(step, metrics)

    def group(self, name: str | None) -> DeviceGroup | None:
        """Return the group called `name`; None stays None. Raises: `ArgumentError` with the groups there are."""
        if name is None:
            return None
        if name not in self.groups:
            raise ArgumentError(
                f"`remote_group={name!r}` is not a group of this run.{did_you_mean(name, self.groups)} Groups: "
                f"{listing(self.groups)}. Declare it: `initialize(groups=[DeviceGroup(name={name!r}, ...)])`.")
        return self.groups[name]

    def close(self) -> None:
        """End the run: flush trackers and stop what the launcher started, also when one of these fails."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.launcher.shutdown)
            for callback in self._closers:
                stack.callback(callback)
            self._closers.clear()


_active: Session | None = None  # the one process-wide reference; everything else lives in the session


def start(
    mode: str | None = None,
    *,
    mesh: DeviceMesh | None = None,
    nproc_per_node: int | None = None,
    groups: Sequence[DeviceGroup] = (),
    lazy_collect: bool = False,
    seed: int = DEFAULT_SEED,
    options: Mapping[str, Any] | None = None,
) -> Session:
    """Start the session of this process and return it. `twinkle.initialize` documents the arguments.

    Raises: `ModeError` if one is active, or if the script and the command line ask for different things.
    """
    _check_none_active()
    settings.check_environ()
    request = settings.launch_request()
    chosen = _agree("mode", mode, request.mode) or plugins.detect_launcher(settings.environ()) or "local"
    asked = DeviceMesh.parse(request.mesh) if request.mesh else None
    mesh = _agree("mesh", mesh, asked)
    launcher_class: type[Launcher] = registry.resolve("launchers", chosen)
    merged = launcher_class.check_options({**request.options, **(options or {})}, where=f"initialize(mode={chosen!r})")
    for name, value in (options or {}).items():
        _agree(name, value, request.options.get(name))
    launcher = launcher_class(
        nproc_per_node=_agree("nproc_per_node", nproc_per_node, request.nproc_per_node), options=merged)
    session = Session(
        mode=chosen, launcher=launcher, mesh=mesh, groups=_groups(groups, request.groups), lazy_collect=lazy_collect,
        seed=seed, options=merged)
    launcher.start(session)
    adopt(session)
    try:
        plugins.configure(session)
    except BaseException:
        stop()
        raise
    return session


def adopt(session: Session) -> None:
    """Make `session` the one of this process, until `stop`. Raises: `ModeError` if there is one."""
    global _active
    _check_none_active()
    _active = session
    atexit.register(_stop_at_exit)


def _check_none_active() -> None:
    if _active is not None:
        raise ModeError(f"Twinkle is already initialized in mode `{_active.mode}`. Call `initialize` once, before the first "
                        "component is built.")


def current() -> Session:
    """Return the session of this process; a default one is started if there is none."""
    return _active or start()


def active() -> Session | None:
    """Return the session of this process, or None if nothing has started one."""
    return _active


def stop() -> None:
    """End the session of this process, if there is one."""
    global _active
    session, _active = _active, None
    if session is not None:
        atexit.unregister(_stop_at_exit)
        session.close()


def _stop_at_exit() -> None:
    try:
        stop()
    except Exception as error:  # the process ends: nobody is left to catch it
        plugins.report_error(error, where="end of the run")


def _agree(what: str, script: Any, command_line: Any) -> Any:
    if script is not None and command_line is not None and script != command_line:
        error = MeshError if what == "mesh" else ModeError
        raise error(f"The script says {what} `{script}`, the command line says `{command_line}`. Change one of them, or leave "
                    "it out of the script.")
    return command_line if script is None else script


def _groups(script: Sequence[DeviceGroup], command_line: Mapping[str, int]) -> dict[str, DeviceGroup]:
    groups: dict[str, DeviceGroup] = {}
    for group in script:
        if group.name in groups:
            raise ArgumentError(f"Two groups are called `{group.name}`. Give each its own name.")
        _agree(f"ranks of group `{group.name}`", group.world_size, command_line.get(group.name))
        groups[group.name] = group
    for name, ranks in command_line.items():
        groups.setdefault(name, DeviceGroup(name=name, ranks=ranks, device_type="cpu"))
    return groups
