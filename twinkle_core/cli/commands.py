"""From what a plugin adds with `twinkle_add_commands` to something that can run, and its one line of help without importing it."""

import ast
import importlib.util
from importlib.machinery import ModuleSpec, PathFinder
from typing import Annotated, Any

import typer

from twinkle_core import plugins, registry
from twinkle_core.errors import BrokenPluginError, DuplicateNameError, MissingExtraError, TwinkleError


def _print_help(context: typer.Context, is_asked: bool) -> None:
    if is_asked:
        print(context.get_help())
        raise typer.Exit


Help = Annotated[
    bool, typer.Option("--help", help="Show this message and exit.", callback=_print_help, is_eager=True, show_default=False)]
"""A parameter in place of typer's own `--help` (`add_help_option=False`), whose reading imports pydantic: 0.1 s with typer 0.29."""


def load_command(command: plugins.Command) -> Any:
    """Import a command and return what can be called with `args`, `prog_name` and `standalone_mode`.

    Raises: `DuplicateNameError` if two plugins add it, `BrokenPluginError` if it cannot be imported or is no command.
    """
    plugin, *others = command.plugins
    if others:
        both = " and ".join(f"`{plugin.distribution}`" for plugin in command.plugins)
        raise DuplicateNameError(f"The command `twinkle {command.name}` is added by {both}. Uninstall one of them, or block one by "
                                 f"TWINKLE_DISABLE_PLUGINS={plugins.load().blocking_key(others[-1])}.")
    whose = f"The command `twinkle {command.name}` of `{plugin.distribution}` {plugin.version}"
    try:
        value = registry.import_target(command.target)
    except MissingExtraError:
        raise
    except Exception as error:  # the boundary to foreign code
        raise BrokenPluginError(f"{whose} cannot be loaded: importing `{command.target}` raised {type(error).__name__}: {error}. "
                                "Upgrade or reinstall that distribution.") from error
    if isinstance(value, typer.Typer):
        return typer.main.get_command(value)
    if not callable(value):
        raise BrokenPluginError(f"{whose} is `{command.target}`, a {type(value).__name__}. It must be a function or a "
                                "`typer.Typer`; its author must mend it.")
    app = typer.Typer(add_completion=False)
    app.command()(value)
    return typer.main.get_command(app)


def summary(target: str) -> str:
    """Return the first line of the docstring of "package.module:function", read without importing; "" if there is none.

    Of anything but a function it is the first line of its module's docstring.
    """
    module, _, name = target.partition(":")
    try:
        spec = _find_spec(module)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return ""
        with open(spec.origin, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, ImportError, TwinkleError):  # a broken command says so when it is run
        return ""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    text = ast.get_docstring(functions[0] if functions else tree) or ""
    return text.partition("\n")[0]


def _find_spec(module: str) -> ModuleSpec | None:
    """Return where a module lies; unlike `importlib.util.find_spec` this imports none of its parent packages."""
    first, *rest = module.split(".")
    spec = importlib.util.find_spec(first)
    name = first
    for part in rest:
        if spec is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    return spec
