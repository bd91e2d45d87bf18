"""The console script `twinkle`: finds the command among those that plugins add, imports it, and shows how it failed.

A command's module is imported when the command runs; its line in `twinkle --help` is read from the source text. What commands
do is left to their modules.
"""

import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

import twinkle_core
from twinkle_core import plugins, settings
from twinkle_core.cli.commands import Help, load_command, summary
from twinkle_core.cli.report import print_error
from twinkle_core.errors import ArgumentError, TwinkleError, UsageError

_LOST_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE, errno.EBADF)
"""What writing to standard output fails with, without a file's name: a full disk, a terminal or reader that is gone."""

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run `twinkle` with `argv` (default: the command line) and return the exit status.

    0 means done, 1 an error, 2 a command line that cannot be understood, 130 Ctrl-C; a script's own `sys.exit` passes.
    """
    try:
        settings.debug()
    except ArgumentError as error:
        return _failed(error)
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv) or ["--help"])
        if sys.stdout is not None:
            sys.stdout.flush()  # a full disk is an error here, and not a traceback at exit
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except (TwinkleError, typer.TyperException, typer.Abort) as error:
        if settings.debug():
            traceback.print_exc()
        return _failed(error)
    except OSError as error:
        if error.filename is not None or error.errno not in _LOST_OUTPUT:
            raise
        _drop_output()
        return 1 if error.errno == errno.EPIPE else _failed(error)  # who closes a pipe has read what they wanted
    if status == _INTERRUPTED:
        print("\nInterrupted.", file=sys.stderr)
    return status


def _drop_output() -> None:
    """Send what standard output still holds nowhere, or exit would fail on it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed(error: Exception) -> int:
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        hint = f" See: {context.command_path} --help" if context is not None else ""
        print_error("UsageError", error.format_message() + hint)
        return error.exit_code
    print_error(type(error).__name__, str(error) or "stopped")
    return 2 if isinstance(error, UsageError) else 1


def _run(argv: list[str]) -> int:
    index = next((i for i, word in enumerate(argv) if not word.startswith("-")), len(argv))
    root = typer.Typer(name="twinkle", add_completion=False, rich_markup_mode=None)  # rich's help adds 0.13 s to every start
    root.callback(add_help_option=False)(_root_options)
    for name, command in plugins.add_commands().items():
        root.command(name, help=summary(command.target), add_help_option=False)(_runner(command, argv[index + 1:]))
    return _status(typer.main.get_command(root)(args=argv[:index + 1], prog_name="twinkle", standalone_mode=False))


def _runner(command: plugins.Command, argv: list[str]) -> Callable[[], int]:
    """Return what typer calls for a command: it reads none of the words itself, so that they reach the command as they are."""

    def run() -> int:
        return _status(load_command(command)(args=argv, prog_name=f"twinkle {command.name}", standalone_mode=False))

    return run


def _status(result: Any) -> int:
    return result if isinstance(result, int) else 0


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"twinkle {twinkle_core.__version__}")
        raise typer.Exit


def _root_options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)]
    = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show every frame of an error.")] = False,
    asks_help: Help = False,
) -> None:
    """Train large language models: your own loop, on one device, under torchrun, on a cluster."""
    if debug:
        settings.update_environ({settings.DEBUG: "1"})  # so that processes which are started know it too
