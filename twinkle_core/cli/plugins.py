"""List the installed plugins, or make a new one.

`twinkle plugins [--json]` and `twinkle plugins new NAME --kind KIND`. Nothing that a plugin registers is imported for the list.
"""

import json
from typing import Annotated, Any

import typer

from twinkle_core import plugins as installed
from twinkle_core import registry
from twinkle_core.cli.commands import Help
from twinkle_core.cli.new_plugin import new

_LEAST_WIDTH = 60
"""Columns below which the table would show dots only; a narrower terminal wraps its lines."""

plugins = typer.Typer(add_completion=False, rich_markup_mode="rich")
plugins.command("new")(new)


@plugins.callback(invoke_without_command=True, add_help_option=False)
def show(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    asks_help: Help = False,
) -> None:
    """List installed plugins: where they come from, what they register, and why one does not work."""
    if context.invoked_subcommand is not None:
        return
    found, conflicts = installed.load().found, find_conflicts()
    if as_json:
        print(json.dumps({"plugins": [describe(plugin) for plugin in found], "conflicts": conflicts}, indent=2))
    else:
        _print_table(found, conflicts)


def describe(plugin: installed.Plugin) -> dict[str, Any]:
    """Return what `--json` shows of one plugin."""
    return {
        "name": plugin.name,
        "module": plugin.module,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "status": "disabled" if plugin.is_disabled else "broken" if plugin.is_broken else "working",
        "reason": plugin.reason,
        "registers": plugin.names,
        "hooks": list(plugin.hooks),
    }


def find_conflicts() -> list[dict[str, Any]]:
    """Return the names that more than one working plugin claims: kind, name and distributions."""
    conflicts: list[dict[str, Any]] = []
    for kind in installed.KINDS:
        for name, entries in registry.names(kind).items():
            if len(entries) > 1:
                conflicts.append({"kind": kind, "name": name, "distributions": [e.plugin.distribution for e in entries]})
    for name, command in installed.add_commands().items():
        if len(command.plugins) > 1:
            conflicts.append(
                {"kind": "commands", "name": name, "distributions": [plugin.distribution for plugin in command.plugins]})
    return conflicts


def _print_table(found: list[installed.Plugin], conflicts: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("plugin", "distribution", "", "registers", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for plugin in found:
        rows = [(kind.replace("_", " "), ", ".join(sorted(names))) for kind, names in plugin.names.items()]
        if plugin.hooks:
            rows.append(("hooks", ", ".join(hook.removeprefix("twinkle_") for hook in plugin.hooks)))
        if plugin.reason:
            rows.insert(0, ("disabled", plugin.reason) if plugin.is_disabled else ("broken", plugin.reason))
        first = (plugin.name, f"{plugin.distribution} {plugin.version}")
        for what, text in rows or [("", "nothing")]:
            style = {"broken": "bold red", "disabled": "yellow"}.get(what, "")
            table.add_row(Text(first[0], "bold"), Text(first[1]), Text(what, style or "dim"), Text(text, style))
            first = ("", "")
    console = Console()
    console.width = max(console.width, _LEAST_WIDTH)
    console.print(table)
    for conflict in conflicts:
        both = " and ".join(conflict["distributions"])
        console.print(Text(f"conflict: `{conflict['name']}` among {conflict['kind'].replace('_', ' ')} is claimed by {both}; using "
                           "it is an error until one is uninstalled or disabled.", "bold red"))
