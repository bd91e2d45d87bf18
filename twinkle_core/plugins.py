"""Loading plugins: the only module that touches pluggy's manager. Each hook has one typed wrapper here.

Plugins are found through the entry-point group `twinkle` and loaded once a process, when something first asks. One that cannot
be loaded is kept with its reason and takes down nothing else. What the registered names mean is left to `registry`.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import pluggy

from twinkle_core import hookspecs, settings
from twinkle_core.errors import (
    ArgumentError,
    BrokenPluginError,
    ModeError,
    PluginError,
    TwinkleError,
    did_you_mean,
    listing,
)

if TYPE_CHECKING:
    from importlib import metadata

    from twinkle_core.session import Session

GROUP = "twinkle"
CORE = "twinkle-core"
KINDS = tuple(name.removeprefix("twinkle_register_") for name in vars(hookspecs) if name.startswith("twinkle_register_"))
"""The registries: "launchers", "templates", ..., one for each `twinkle_register_*` hook."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """One entry point.

    Attributes:
        name: of the entry point.
        module: the module it names.
        distribution: what pip installed.
        version: of the distribution.
        names: kind -> public name -> "package.module:attribute". Of a broken plugin, what could be read.
        reason: why it is broken, "disabled by TWINKLE_DISABLE_PLUGINS", or "" when it works.
        hooks: the behavioural hooks it implements.
    """

    name: str
    module: str
    distribution: str
    version: str
    names: dict[str, dict[str, str]] = field(default_factory=lambda: dict[str, dict[str, str]]())
    hooks: tuple[str, ...] = ()
    reason: str = ""

    @property
    def keys(self) -> tuple[str, str, str]:
        """The names by which `TWINKLE_DISABLE_PLUGINS` blocks it, from the shortest to the one that no other plugin can have."""
        return self.name, self.distribution, f"{self.distribution}:{self.name}"

    @property
    def is_disabled(self) -> bool:
        """Whether the user blocked it."""
        return self.reason == _DISABLED

    @property
    def is_broken(self) -> bool:
        """Whether it could not be loaded."""
        return bool(self.reason) and not self.is_disabled


_DISABLED = "disabled by TWINKLE_DISABLE_PLUGINS"


class Plugins:
    """What is installed: a pluggy manager and a record of every entry point. `load()` makes the one of this process."""

    def __init__(
        self, entry_points: "Iterable[metadata.EntryPoint]", unreadable: Iterable[Plugin] = (), *,
        disabled: frozenset[str] = frozenset(),
    ) -> None:
        self._manager = pluggy.PluginManager(GROUP)
        self._manager.add_hookspecs(hookspecs)
        self.found: list[Plugin] = []
        self._left_out: set[str] = set()
        by_place: dict[tuple[bool, str, str], metadata.EntryPoint] = {}
        for entry_point in entry_points:
            distribution = entry_point.dist.name if entry_point.dist else "an unknown distribution"
            # One distribution can be found twice on sys.path: the first one is imported.
            by_place.setdefault((distribution != CORE, entry_point.name, distribution), entry_point)
        for (_, _, distribution), entry_point in sorted(by_place.items(), key=lambda item: item[0]):
            self.found.append(self._load(entry_point, distribution, disabled))
        self.found += unreadable
        for name in sorted(disabled.difference(*(plugin.keys for plugin in self.found))):
            print(f"twinkle: TWINKLE_DISABLE_PLUGINS names `{name}`, which is not installed. Installed: "
                  f"{listing(plugin.name for plugin in self.found)}.", file=sys.stderr)

    def _load(self, entry_point: "metadata.EntryPoint", distribution: str, disabled: frozenset[str]) -> Plugin:
        version = entry_point.dist.version if entry_point.dist else ""
        plugin = functools.partial(
            Plugin, name=entry_point.name, module=entry_point.value, distribution=distribution, version=version)
        if not disabled.isdisjoint(plugin().keys):
            return plugin(reason=_DISABLED)
        try:
            module = entry_point.load()
        except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code: what it raises is its reason
            return plugin(reason=f"`import {entry_point.value}` failed: {type(error).__name__}: {error}")
        if not isinstance(module, ModuleType):
            return plugin(reason=f"the entry point names `{entry_point.value}`, which is a {type(module).__name__}. "
                                 "Name the module that holds the hooks.")
        names, reason = _registered_names(module)
        reason = self._register(module, f"{distribution}:{entry_point.name}") or reason
        return plugin(names=names, hooks=() if reason else _behavioural_hooks(module), reason=reason)

    def _register(self, module: ModuleType, name: str) -> str:
        """Register `module`, or leave it out and return why it breaks the contract."""
        try:
            self._manager.register(module, name)
            self._manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            if self._manager.get_plugin(name) is not None:
                self._manager.unregister(module)
            return _hook_advice(str(error).replace("\n", " "), module)
        return ""

    def blocking_key(self, plugin: Plugin) -> str:
        """Return the shortest name that makes `TWINKLE_DISABLE_PLUGINS` block this plugin and no other."""
        others = {key for other in self.found if other is not plugin for key in other.keys}
        return next((key for key in plugin.keys if key not in others), plugin.keys[-1])

    def begin_run(self) -> None:
        """Give every plugin a new chance: `leave_out` counts for one run."""
        self._left_out.clear()

    def leave_out(self, plugin: Plugin, hook: str, error: TwinkleError) -> None:
        """Call no hook of a plugin any more, because `hook` raised `error`, and say so once on stderr."""
        self._left_out.add(plugin.keys[-1])
        cause = error.__cause__ if isinstance(error, BrokenPluginError) else error
        print(f"twinkle: `{hook}` of the plugin `{plugin.name}` ({plugin.distribution} {plugin.version}) raised "
              f"{type(cause).__name__}: {cause}. The run goes on without the plugin; "
              f"TWINKLE_DISABLE_PLUGINS={self.blocking_key(plugin)} turns it off.", file=sys.stderr)

    def call(self, plugin: Plugin, hook: str, **arguments: Any) -> list[Any]:
        """Call `hook` of one plugin and return its results without the Nones: none if it has no such hook, or was left out.

        Raises: the plugin's own `TwinkleError`, else `BrokenPluginError`.
        """
        if plugin.reason or hook not in plugin.hooks or plugin.keys[-1] in self._left_out:
            return []
        module = self._manager.get_plugin(f"{plugin.distribution}:{plugin.name}")
        others = [other for other in self._manager.get_plugins() if other is not module]
        try:
            return self._manager.subset_hook_caller(hook, others)(**arguments)
        except TwinkleError:
            raise
        except Exception as error:  # the boundary to foreign code
            raise BrokenPluginError(
                f"`{hook}` of the plugin `{plugin.name}` ({plugin.distribution} {plugin.version}) raised "
                f"{type(error).__name__}: {error}. TWINKLE_DISABLE_PLUGINS={self.blocking_key(plugin)} turns the plugin off."
            ) from error


def _implementations(module: ModuleType) -> Iterable[tuple[str, Callable[..., Any]]]:
    for name, value in vars(module).items():
        if callable(value) and hasattr(value, "twinkle_impl"):
            yield name, value


def _behavioural_hooks(module: ModuleType) -> tuple[str, ...]:
    return tuple(name for name, _ in _implementations(module) if not name.startswith("twinkle_register_"))


def _registered_names(module: ModuleType) -> tuple[dict[str, dict[str, str]], str]:
    """Return kind -> name -> target of `module`, and why it is broken ("" if it is not)."""
    names: dict[str, dict[str, str]] = {}
    for hook, implementation in _implementations(module):
        kind = hook.removeprefix("twinkle_register_")
        if kind not in KINDS:
            continue
        if inspect.signature(implementation).parameters:
            return names, f"`{hook}` takes no arguments."
        try:
            registered: object = implementation()
        except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code, as above
            return names, f"`{hook}` raised {type(error).__name__}: {error}"
        if not isinstance(registered, Mapping):
            return names, (f"`{hook}` returned a {type(registered).__name__}. Return a mapping, public name -> "
                           "\"package.module:attribute\".")
        for name, target in cast("Mapping[Any, Any]", registered).items():
            if not _is_target(name, target):
                return names, _bad_target(hook, name, target)
            names.setdefault(kind, {})[name] = target
    return names, ""


def _is_target(name: Any, target: Any) -> bool:
    return isinstance(name, str) and isinstance(target, str) and target.count(":") == 1


def _bad_target(hook: str, name: Any, target: Any) -> str:
    return f"`{hook}` maps {name!r} to {target!r}. Map a name to \"package.module:attribute\"."


def _hook_advice(problem: str, module: ModuleType) -> str:
    specs = {name: value for name, value in vars(hookspecs).items() if hasattr(value, "twinkle_spec")}
    for name, implementation in _implementations(module):
        if name not in specs:
            return f"`{name}` is not a hook.{did_you_mean(name, specs)} Hooks: {listing(specs)}."
        unknown = set(inspect.signature(implementation).parameters) - set(inspect.signature(specs[name]).parameters)
        if unknown:
            return (f"`{name}` takes {listing(unknown)}, which the hook does not pass. It passes: "
                    f"{listing(inspect.signature(specs[name]).parameters)}.")
    return problem


def _readable_entry_points() -> "tuple[list[metadata.EntryPoint], list[Plugin]]":
    """Return the entry points of the distributions whose `entry_points.txt` can be read, and the others as broken plugins."""
    from importlib import metadata

    readable: list[metadata.EntryPoint] = []
    broken: list[Plugin] = []
    for distribution in metadata.distributions():
        try:
            readable += distribution.entry_points.select(group=GROUP)
        except Exception as error:  # the boundary to foreign files
            broken.append(Plugin(name=distribution.name, module="", distribution=distribution.name, version=distribution.version,
                                 reason=f"its `entry_points.txt` cannot be read: {error}. Reinstall or uninstall it."))
    return readable, broken


@functools.cache
def load() -> Plugins:
    """Return the plugins of this process, loaded at the first call."""
    from importlib import metadata  # 15 ms that `import twinkle` need not pay

    disabled = settings.disabled_plugins()
    own = disabled.intersection({"core", CORE, f"{CORE}:core"})
    if own:
        raise ArgumentError(f"TWINKLE_DISABLE_PLUGINS names {listing(own)}, which brings the launcher, hubs and models that "
                            "everything else needs. Take it out of the list.")
    unreadable: list[Plugin] = []
    try:
        entry_points = list(metadata.entry_points(group=GROUP))
    except Exception:  # the boundary to foreign files: that of one distribution cannot be read
        entry_points, unreadable = _readable_entry_points()
    loaded = Plugins(entry_points, unreadable, disabled=disabled)
    if not any(plugin.distribution == CORE for plugin in loaded.found):
        raise PluginError("The distribution `twinkle-core` is not installed in this environment, only its source is on the "
                          "path, so its entry point cannot be found. Run: pip install twinkle-core (in a checkout: make install)")
    return loaded


@dataclass(frozen=True, kw_only=True)
class Command:
    """A subcommand of `twinkle`: what plugins add under one name. More than one plugin is a conflict, an error when it is run."""

    name: str
    target: str
    plugins: tuple[Plugin, ...]


def add_commands() -> dict[str, Command]:
    """Return the subcommands that plugins add. A plugin whose hook fails is named on stderr."""
    commands: dict[str, Command] = {}
    for plugin in load().found:
        added: dict[str, str] = {}
        try:
            load().call(plugin, "twinkle_add_commands", commands=added)
        except TwinkleError as error:  # the plugin's fault, which must not take down the other commands
            print(f"twinkle: {error}", file=sys.stderr)
        for name, target in added.items():
            if not _is_target(name, target):
                print(f"twinkle: {_bad_target('twinkle_add_commands', name, target)} ({plugin.distribution})", file=sys.stderr)
                continue
            claims = commands[name].plugins if name in commands else ()
            commands[name] = Command(name=name, target=target, plugins=(*claims, plugin))
    return commands


def detect_launcher(environ: Mapping[str, str]) -> str | None:
    """Return the launcher that recognises this environment, or None. Raises: `ModeError` if two do."""
    answers: dict[str, Plugin] = {}
    for plugin in load().found:
        for mode in load().call(plugin, "twinkle_detect_launcher", environ=environ):
            answers[str(mode)] = plugin
    if len(answers) > 1:
        both = " and ".join(f"`{mode}` (of {plugin.distribution})" for mode, plugin in sorted(answers.items()))
        raise ModeError(f"The launchers {both} both recognise this environment. Say which: `twinkle launch --mode NAME`, or "
                        "`initialize(mode=NAME)`.")
    return next(iter(answers), None)


def configure(session: "Session") -> None:
    """Let every plugin prepare for a run.

    Raises: the first `TwinkleError` that a plugin itself raises, since it says that the run cannot be as the user wants it. A
    plugin that fails in any other way is named on stderr and left out of the run; the core's own failure raises.
    """
    loaded = load()
    loaded.begin_run()
    for plugin in loaded.found:
        try:
            loaded.call(plugin, "twinkle_configure", session=session)
        except BrokenPluginError as error:
            if plugin.distribution == CORE:
                raise
            loaded.leave_out(plugin, "twinkle_configure", error)


def log_metrics(step: int, metrics: Mapping[str, float]) -> None:
    """Hand the numbers of a step to every tracker, whichever fails.

    Raises: the core's own error, after all were called. Another plugin that fails is named on stderr and left out from then on:
    a tracker is not worth a training run.
    """
    loaded = load()
    own: TwinkleError | None = None
    for plugin in loaded.found:
        try:
            loaded.call(plugin, "twinkle_log_metrics", step=step, metrics=dict(metrics))
        except TwinkleError as error:
            if plugin.distribution == CORE:
                own = error
            else:
                loaded.leave_out(plugin, "twinkle_log_metrics", error)
    if own is not None:
        raise own


def report_error(error: BaseException, where: str) -> None:
    """Report an error at a process boundary to every plugin that reports errors. One that fails does not hide the error."""
    for plugin in load().found:
        try:
            load().call(plugin, "twinkle_report_error", error=error, where=where)
        except TwinkleError as failure:
            print(f"twinkle: {failure}", file=sys.stderr)
