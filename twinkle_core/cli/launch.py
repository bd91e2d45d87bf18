"""Run a script, in a mode.

`twinkle launch [OPTIONS] SCRIPT [ARGS...]` reads what is asked of the run and hands it to the launcher of the mode. Which options
there are depends on the mode, so the mode is looked for first. Running the script is left to the launcher.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from twinkle_core import registry
from twinkle_core.errors import ArgumentError, UsageError, listing
from twinkle_core.launchers.interface import Launcher
from twinkle_core.mesh import DeviceMesh
from twinkle_core.settings import LaunchRequest

_DEFAULT_MODE = "local"  # runs the script here; `initialize` in the script may still say another mode

launch = typer.Typer(add_completion=False)


@launch.command(
    add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(words: Annotated[list[str] | None, typer.Argument()] = None) -> int:
    """Run a script in a mode. Arguments after the script are the script's."""
    return launch_words(words or [])


def launch_words(words: Sequence[str]) -> int:
    """Launch what the words after `twinkle launch` ask for and return the exit status.

    Raises: `UsageError` for options that the mode does not have or values that it does not take; what `Launcher.launch` raises.
    """
    mode = _said_mode(words)
    said = _parse(mode, words)
    if said is not None and said["mode"] != mode:  # what looked like `--mode` stands among the script's arguments
        said = _parse(said["mode"], words)
    if said is None:
        return 0
    launcher = _launcher(said["mode"])
    request = _request(launcher, said)
    return launcher.launch(said["script"], said["arguments"] or [], request)


def _said_mode(words: Sequence[str]) -> str | None:
    """Return the value of `--mode`, looking only as far as these words can be options of some launcher and their values."""
    flags = {"--help", *(flag for option in Launcher.all_options() if option.type is bool for flag in _flags(option.name))}
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position] != "--":
        name, equals, value = words[position].partition("=")
        following = words[position + 1] if position + 1 < len(words) else "-"
        if name == "--mode":
            return value if equals else None if following.startswith("-") else following
        takes_next = not equals and name not in flags and not following.startswith("-")
        position += 2 if takes_next else 1
    return None


def _launcher(mode: str | None) -> type[Launcher]:
    return registry.resolve("launchers", mode or _DEFAULT_MODE)


def _flags(name: str) -> tuple[str, str]:
    dashed = name.replace("_", "-")
    return f"--{dashed}", f"--no-{dashed}"


def _parse(mode: str | None, words: Sequence[str]) -> dict[str, Any] | None:
    """Return parameter -> value as typer reads `words` with the options of `mode`; None if they asked for help, now printed."""
    said: dict[str, Any] = {}
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(context_settings={"allow_interspersed_args": False})(_reader(_launcher(mode), mode, said))
    typer.main.get_command(app)(args=list(words), prog_name="twinkle launch", standalone_mode=False)
    return said or None


def _reader(launcher: type[Launcher], mode: str | None, said: dict[str, Any]) -> Callable[..., None]:
    """Return a function with the launcher's options as its parameters, for typer to read, that stores their values in `said`."""
    parameters = [_parameter("mode", str, typer.Option("--mode", help=_modes(), metavar="NAME"))]
    if "nproc_per_node" in launcher.accepts:
        parameters.append(_parameter("nproc_per_node", int, typer.Option("--nproc-per-node", min=1, help="Ranks a node.")))
    if "mesh" in launcher.accepts:
        parameters.append(_parameter("mesh", str, typer.Option(
            "--mesh", metavar="AXIS=SIZE,...", help="Arrangement of the ranks, e.g. fsdp=4,dp=2.")))
    if "group" in launcher.accepts:
        parameters.append(_parameter("group", list[str], typer.Option(
            "--group", metavar="NAME=RANKS", help="A group for `remote_group=`; may be given several times.")))
    for option in launcher.all_options():
        names = _flags(option.name)
        flag = "/".join(names) if option.type is bool else names[0]
        choices = "|".join(option.choices) or None
        text = option.help if option.default in (None, False) else f"{option.help} Default: {option.default}."
        parameters.append(_parameter(option.name, option.type, typer.Option(flag, help=text, metavar=choices)))
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    script = typer.Argument(metavar="SCRIPT", help="The Python file to run.", show_default=False)
    parameters.append(
        inspect.Parameter("script", kind, annotation=Annotated[str, script]) if launcher.needs_script
        else _parameter("script", str, script))
    parameters.append(_parameter("arguments", list[str], typer.Argument(metavar="ARGS", help="Arguments of the script.")))

    def read(**values: Any) -> None:
        said.update(values)

    read.__doc__ = (f"Run a script in mode `{mode or _DEFAULT_MODE}`. Arguments after the script are the script's.")
    read.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        sorted(parameters, key=lambda parameter: parameter.default is not inspect.Parameter.empty))
    read.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return read


def _parameter(name: str, kind: Any, info: Any) -> inspect.Parameter:
    """Return a parameter that is None when nobody says it: then the script decides."""
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=Annotated[kind | None, info])


def _modes() -> str:
    installed = registry.names("launchers")
    others = {name: where for name, where in registry.KNOWN_DISTRIBUTIONS["launchers"].items() if name not in installed}
    text = f"Installed: {listing(installed)}."
    for name, distribution in others.items():
        text += f" `{name}` comes with: pip install {distribution}."
    return text


def _request(launcher: type[Launcher], said: Mapping[str, Any]) -> LaunchRequest:
    """Return the request; what was not said is left out of it. Raises: `UsageError`."""
    command = f"twinkle launch --mode {said['mode'] or _DEFAULT_MODE}"
    declared = {option.name for option in launcher.all_options()}
    options = {name: value for name, value in said.items() if name in declared and value is not None}
    try:
        launcher.check_options(options, where=command)
        if said.get("mesh"):
            DeviceMesh.parse(said["mesh"])
    except ArgumentError as error:
        raise UsageError(str(error)) from error
    return LaunchRequest(
        mode=said["mode"], mesh=said.get("mesh"), nproc_per_node=said.get("nproc_per_node"),
        groups=_groups(said.get("group") or ()), options=options)


def _groups(texts: Sequence[str]) -> dict[str, int]:
    groups: dict[str, int] = {}
    for text in texts:
        name, equals, ranks = text.partition("=")
        if not name or not equals or not ranks.isdecimal() or int(ranks) < 1:
            raise UsageError(f"`--group {text}` is not of the form NAME=RANKS, as in `--group sampler=2`, with at least 1 rank.")
        if name in groups:
            raise UsageError(f"`--group {name}=...` stands twice. Give each group its own name.")
        groups[name] = int(ranks)
    return groups
