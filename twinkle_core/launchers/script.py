"""Running a script in this process exactly as `python SCRIPT` does; only SIGTERM ends it as Ctrl-C would, not at once."""

import builtins
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from twinkle_core import plugins
from twinkle_core.errors import ArgumentError, UsageError


def check_script(script: str | None) -> str:
    """Return `script` if it can be run. Raises: `UsageError` without one, `ArgumentError` if it is no file."""
    if script is None:
        raise UsageError("`twinkle launch` needs a script. Use: twinkle launch [OPTIONS] SCRIPT [ARGS...]")
    path = Path(script)
    if not path.is_file():
        raise ArgumentError(f"The script `{script}` is not a file{' but a folder' if path.is_dir() else ''} "
                            f"(looked in `{Path.cwd()}`). Give the path of a Python file.")
    hiding = path.resolve().with_name("twinkle.py")
    if hiding.is_file() and not sys.flags.safe_path:
        raise ArgumentError(f"`import twinkle` in `{script}` would find `{hiding}`, which lies beside it. Rename that file.")
    return script


def run_script(
    script: str, argv: Sequence[str], *, on_error: Callable[[BaseException, str], None] = plugins.report_error,
) -> int:
    """Run `script` as the `__main__` of this process and return the exit status: 1 after an error, given to `on_error`.

    `SystemExit` and `KeyboardInterrupt` pass. `__main__` stays the script's afterwards, for its threads, its functions that run at
    exit, and what pickle and multiprocessing look up in it; `runpy` would put the old one back.
    """
    path = os.path.join(os.getcwd(), script)  # absolute but not normalised, as python's `__file__`
    main = ModuleType("__main__")
    main.__dict__.update(
        __file__=path, __builtins__=builtins, __loader__=SourceFileLoader("__main__", path), __annotations__={}, __cached__=None)
    sys.modules["__main__"] = main
    sys.argv = [script, *argv]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    try:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, main.__dict__)
    except Exception as error:  # noqa: BLE001  the boundary to the user's code
        sys.last_value = error
        on_error(error, f"script {script}")
        return 1
    except BaseException as error:
        sys.last_value = error
        raise
    return 0


def end_on_sigterm() -> None:
    """Let SIGTERM, by which schedulers end a job, run what is to run at exit, such as drawing a plot. The status is the shell's."""
    owner = os.getpid()

    def end(number: int, frame: object) -> None:
        if os.getpid() != owner:  # a process that the script forked ends as it would without us
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end)
