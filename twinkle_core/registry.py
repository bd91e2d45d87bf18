"""From a public name to the object behind it, for every kind that plugins register.

`resolve("templates", "Qwen3_5Template")` imports what an installed plugin registered under the name. The registry holds no
names of its own but those in `KNOWN_DISTRIBUTIONS`: where a first-party name lives, so that an error can say what to install.
"""

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from twinkle_core import plugins
from twinkle_core.errors import (
    ArgumentTypeError,
    BrokenPluginError,
    DuplicateNameError,
    MissingExtraError,
    MissingPluginError,
    UnknownNameError,
    check_keywords,
    did_you_mean,
    listing,
)

INTERFACES = {
    "launchers": "twinkle_core.launchers.interface:Launcher",
    "platforms": "twinkle_core.platforms.interface:Platform",
    "hubs": "twinkle_core.hub.interface:Hub",
    "preprocessors": "twinkle_core.preprocessor.interface:Preprocessor",
    "templates": "twinkle_core.template.template:Template",
    "model_families": "twinkle_core.model.family:ModelFamily",
    "models": "twinkle_core.model.interface:TrainableModel",
    "parallel_strategies": "twinkle_core.parallel.interface:ParallelStrategy",
    "losses": "twinkle_core.loss.interface:Loss",
    "metrics": "twinkle_core.metric.interface:Metric",
    "samplers": "twinkle_core.sampler.interface:Sampler",
    "rewards": "twinkle_core.reward.interface:Reward",
}
"""What the object behind a name must be a subclass of (or, for model families, an instance)."""

KNOWN_DISTRIBUTIONS = {
    "launchers": {"ray": "twinkle-ray", "http": "twinkle-http"},
    "hubs": {"tiny": "twinkle-qwen"},
    "samplers": {"vLLMSampler": "twinkle-vllm"},
    "templates": {"Qwen3_5Template": "twinkle-qwen", "Qwen3Template": "twinkle-qwen", "Qwen2_5Template": "twinkle-qwen"},
}

EXTRAS = {
    "data": ("transformers", "jinja2", "datasets", "modelscope", "huggingface_hub"),
    "train": ("torch", "peft", "safetensors"),
    "rewards": ("math_verify",),
}
"""Extra of twinkle-core -> the modules it brings, so that an error about a missing one can say what to install."""


@dataclass(frozen=True)
class Entry:
    """One registered name: the "package.module:attribute" behind it and the plugin that registers it."""

    name: str
    target: str
    plugin: plugins.Plugin


def names(kind: str) -> dict[str, list[Entry]]:
    """Return public name -> its entries among working plugins; more than one is a conflict that `resolve` reports."""
    table: dict[str, list[Entry]] = {}
    for plugin in plugins.load().found:
        if not plugin.reason:
            for name, target in plugin.names.get(kind, {}).items():
                table.setdefault(name, []).append(Entry(name, target, plugin))
    return table


def resolve(kind: str, name: str) -> Any:
    """Return the object that is registered as `name` among `kind`, e.g. the class of a template.

    Raises:
        UnknownNameError: nobody registers it; the text has near matches and all names.
        MissingPluginError: a known distribution that is not installed registers it.
        DuplicateNameError: two distributions register it.
        BrokenPluginError: its plugin, its module or its interface is broken.
    """
    entries = names(kind).get(name, [])
    if not entries:
        raise _not_found(kind, name)
    if len(entries) > 1:
        both = " and ".join(f"`{entry.plugin.distribution}`" for entry in entries)
        raise DuplicateNameError(
            f"The name `{name}` among {_words(kind)} is claimed by {both}. Uninstall one of them, or block one by "
            f"TWINKLE_DISABLE_PLUGINS={plugins.load().blocking_key(entries[-1].plugin)}.")
    return _load(kind, entries[0])


def name_of(kind: str, cls: type) -> str | None:
    """Return the name by which a plugin registers `cls` among `kind`, or None."""
    target = f"{cls.__module__}:{cls.__qualname__}"
    return next((name for name, entries in names(kind).items() if any(entry.target == target for entry in entries)), None)


def resolve_argument(
    kind: str,
    value: Any,
    *,
    argument: str,
    options: dict[str, Any],
    function: Callable[[Any], Any] | None = None,
    own: Sequence[str] = (),
) -> Any:
    """Return the instance that a class argument means: a class, an instance, a registered name or a function.

    Args:
        kind: registry, e.g. "losses".
        value: what the user passed.
        argument: what to call it in an error, e.g. "set_loss".
        options: keywords for the constructor; with an instance or a function they are an error.
        function: makes an instance of a function; None where functions make no sense.
        own: keywords of `argument` itself, among which a misspelt option may have been meant.

    Raises: `ArgumentTypeError` for anything else, and for options that the constructor does not take or lacks; what `resolve`
    raises.
    """
    interface = _interface(kind)
    if isinstance(value, str):
        value = resolve(kind, value)
    if inspect.isclass(value) and issubclass(value, interface):
        _check_options(f"{argument}({value.__name__})", value, options, own)
        return value(**options)
    is_instance = isinstance(value, interface)
    if is_instance or (function is not None and callable(value) and not inspect.isclass(value)):
        if options:
            if own:
                check_keywords(argument, options, own)
            raise ArgumentTypeError(f"`{argument}` got {listing(options)}, which only a class or a name can take, together with "
                                    f"{value!r}. Pass the arguments when you make it.")
        return value if is_instance else cast("Callable[[Any], Any]", function)(value)
    allowed = f"a registered name ({listing(names(kind))}), a subclass or an instance of `{interface.__name__}`"
    raise ArgumentTypeError(f"`{argument}` got {value!r} of type {type(value).__name__}. Pass {allowed}"
                            f"{', or a function' if function is not None else ''}.")


def _check_options(what: str, cls: type, options: dict[str, Any], own: Sequence[str]) -> None:
    """Raise for a misspelt or missing argument of the constructor of `cls`."""
    signature = inspect.signature(cls)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        check_keywords(what, options, [*signature.parameters, *own])
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ArgumentTypeError(f"`{what}`: {error}. It takes {signature}.") from error


def lazy_exports(module: str, *, kind: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a module of the public face whose names are what plugins register as `kind`."""

    def __getattr__(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module `{module}` has no attribute `{name}`")
        return resolve(kind, name)

    def __dir__() -> list[str]:
        own = vars(importlib.import_module(module))
        return sorted({*names(kind), *(name for name in own if not name.startswith("_"))})

    return __getattr__, __dir__


def import_target(target: str) -> Any:
    """Return the object that "package.module:attribute" names."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


@functools.cache
def _interface(kind: str) -> type:
    return import_target(INTERFACES[kind])


def _load(kind: str, entry: Entry) -> Any:
    try:
        value = import_target(entry.target)
    except MissingExtraError:
        raise
    except Exception as error:  # the boundary to foreign code
        missing = str(error.name).partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        for extra, modules in EXTRAS.items():
            if missing in modules:
                raise MissingExtraError(f"`{entry.name}` needs {missing}, which is not installed. "
                                        f"Run: pip install 'twinkle-core[{extra}]'") from error
        raise BrokenPluginError(
            f"`{entry.name}` of `{entry.plugin.distribution}` {entry.plugin.version} cannot be loaded: importing "
            f"`{entry.target}` raised {type(error).__name__}: {error}. Upgrade or reinstall that distribution.") from error
    interface = _interface(kind)
    is_right = isinstance(value, interface) if kind == "model_families" else (
        inspect.isclass(value) and issubclass(value, interface))
    if not is_right:
        raise BrokenPluginError(
            f"`{entry.name}` of `{entry.plugin.distribution}` {entry.plugin.version} is `{entry.target}`, which is not "
            f"{'an instance' if kind == 'model_families' else 'a subclass'} of `{INTERFACES[kind]}`. Its author must mend it.")
    return value


def _words(kind: str) -> str:
    return kind.replace("_", " ")


def _not_found(kind: str, name: str) -> Exception:
    known = KNOWN_DISTRIBUTIONS.get(kind, {})
    found = plugins.load().found
    for plugin in found:
        is_owner = name in plugin.names.get(kind, {}) or plugin.distribution == known.get(name)
        if plugin.reason and is_owner:
            return BrokenPluginError(
                f"`{name}` comes from the plugin `{plugin.name}` ({plugin.distribution} {plugin.version}), which is "
                f"{'' if plugin.is_disabled else 'broken: '}{plugin.reason}")
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    if name in known:
        return MissingPluginError(f"`{name}` needs the `{known[name]}` distribution, which is not installed. "
                                  f"Run: pip install {known[name]}")
    installed = names(kind)
    message = (f"No installed plugin registers `{name}` among {_words(kind)}.{did_you_mean(name, {**installed, **known})} "
               f"Installed: {listing(installed)}.")
    if near and near[0] not in installed:
        message += f" `{near[0]}` comes with: pip install {known[near[0]]}."
    broken = [plugin.name for plugin in found if plugin.is_broken]
    if broken:
        message += f" Broken plugins, which may bring it: {listing(broken)}. See: twinkle plugins."
    disabled = [plugin.name for plugin in found if plugin.is_disabled]
    if disabled:
        message += f" Disabled by TWINKLE_DISABLE_PLUGINS, and may bring it: {listing(disabled)}."
    return UnknownNameError(message)
