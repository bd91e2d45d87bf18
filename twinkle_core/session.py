"""The state of a run: which launcher is active, the mesh, the groups, the seed, and the numbers last reported.

There is one session a process. `start` makes it (through `twinkle.initialize`), `current` returns it and starts a default one
when a component is built before anything was said. The session knows launchers by their interface only; their names come from
the registry.
"""

import atexit
import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from twinkle_core import plugins, registry, settings
from twinkle_core.errors import ArgumentError, ArgumentTypeError, MeshError, ModeError, did_you_mean, listing
from twinkle_core.mesh import AUTO, DeviceGroup, DeviceMesh

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

    def on_close(self, callback: Callable[[], None], *, last: bool = False) -> None:
        """Call `callback` when the session ends; the last registered is called first, or after all others if it says `last`."""
        self._closers.insert(0 if last else len(self._closers), callback)

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

    Raises: `ModeError` if one is active, or if the script and the command line ask for different things; `ArgumentTypeError` and
    `ArgumentError` for arguments of a wrong type or value.
    """
    _check_none_active()
    groups = _check_arguments(mode, mesh, nproc_per_node, groups, lazy_collect, seed)
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
    _shorten_ctrl_c(session)
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
    except Exception as error:  # noqa: BLE001  the process ends: nobody is left to catch it
        plugins.report_error(error, where="end of the run")


def _shorten_ctrl_c(session: Session) -> None:
    """End a script that Ctrl-C stops with a line instead of a traceback; Python goes on to end it by SIGINT (status 130).

    Only where the script has no hook of its own, nobody is to go on working in the interpreter, and `TWINKLE_DEBUG` is off.
    """
    is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    if sys.excepthook is sys.__excepthook__ and not is_interactive and not settings.debug():
        sys.excepthook = _excepthook
        session.on_close(_restore_excepthook)


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("\nInterrupted.", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _restore_excepthook() -> None:
    if sys.excepthook is _excepthook:
        sys.excepthook = sys.__excepthook__


def _check_arguments(
    mode: Any, mesh: Any, nproc_per_node: Any, groups: Any, lazy_collect: Any, seed: Any,
) -> tuple[DeviceGroup, ...]:
    """Return the groups. Raises: `ArgumentTypeError` or `ArgumentError` for what `initialize` does not take."""

    def wrong(name: str, value: Any, remedy: str) -> ArgumentTypeError:
        return ArgumentTypeError(f"`initialize({name}={value!r})` is a {type(value).__name__}. {remedy}")

    if mode is not None and not isinstance(mode, str):
        raise wrong("mode", mode, f"Use the name of a mode ({listing(registry.names('launchers'))}), or leave it out.")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise wrong("global_device_mesh", mesh, "Use a `DeviceMesh`, as `DeviceMesh.from_sizes(dp_size=2)` makes it.")
    if nproc_per_node is not None:
        if not _is_integer(nproc_per_node):
            raise wrong("nproc_per_node", nproc_per_node, "Use a number of processes, an integer >= 1, or leave it out.")
        if nproc_per_node < 1:
            raise ArgumentError(f"`initialize(nproc_per_node={nproc_per_node})`: use at least 1 process, or leave it out.")
    if isinstance(groups, str | DeviceGroup) or not isinstance(groups, Iterable):
        raise wrong("groups", groups, "Use a list: `groups=[DeviceGroup(name=\"model\", ranks=2, device_type=\"cuda\")]`.")
    listed = tuple(cast("Iterable[Any]", groups))
    for group in listed:
        if not isinstance(group, DeviceGroup):
            raise ArgumentTypeError(f"`initialize(groups=...)` holds {group!r}, a {type(group).__name__}. Use `DeviceGroup`s: "
                                    "`DeviceGroup(name=\"model\", ranks=2, device_type=\"cuda\")`.")
    if not isinstance(lazy_collect, bool):
        raise wrong("lazy_collect", lazy_collect, "Use True or False.")
    if not _is_integer(seed):
        raise wrong("seed", seed, "Use an integer from 0 to 2**63 - 1.")
    if not 0 <= seed < 2**63:
        raise ArgumentError(f"`initialize(seed={seed})`: use an integer from 0 to 2**63 - 1.")
    return listed


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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
        groups.setdefault(name, DeviceGroup(name=name, ranks=ranks, device_type=AUTO))
    return groups
