"""What `twinkle launch --mode torchrun` runs as each rank: `python -m twinkle_core.launchers.rank LAUNCHER_PID SCRIPT [ARGS...]`.

An error that ends the script is written, as it would be shown, to the file that the launcher names, together with its time; the
launcher shows the first one of all ranks (`rank_logs`). A rank whose launcher is gone ends, with what it has started.
"""

import atexit
import contextlib
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from twinkle_core import plugins, settings
from twinkle_core.errors import first_line
from twinkle_core.launchers.script import end_on_sigterm, run_script

_CLOSING_S = 3.0
"""How long a rank that fails may take to draw plots and the like: leaving a process group may wait for ranks that never come."""

_GONE = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
"""Words of the errors that C++ raises where another rank is missed."""


def main() -> None:
    """Run the script that the command line names, and end the process with its status."""
    launcher, script, *argv = sys.argv[1:]
    threading.Thread(target=_end_with, args=(int(launcher),), daemon=True).start()
    end_on_sigterm()
    if (rank := settings.torchrun_rank()) is not None and rank.rank:
        os.dup2(1, 2)  # torch opened the log once for each stream: they would write over each other
    try:
        status = run_script(script, argv, on_error=_record)
    except SystemExit as ending:
        status = _status(ending)
    except KeyboardInterrupt:  # the launcher passed Ctrl-C on, and says so
        status = 128 + signal.SIGINT
    if status:
        _end(status)


def _end_with(launcher: int) -> None:
    """Kill this rank and what it has started once its launcher is gone, which had no time to do so itself."""
    while os.getppid() == launcher:
        time.sleep(0.5)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _end(status: int) -> None:
    """End the process after what is to run at exit, or without the rest of it if that takes too long."""
    closing = threading.Thread(target=atexit._run_exitfuncs, daemon=True)  # pyright: ignore[reportPrivateUsage]  as multiprocessing
    closing.start()
    closing.join(_CLOSING_S)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _status(ending: SystemExit) -> int:
    """Return the exit status that `ending` means to Python, and tell the launcher of one that is not 0."""
    if ending.code is None or isinstance(ending.code, int):
        status, text = int(ending.code or 0) & 0xFF, ""
    else:
        status, text = 1, f"{ending.code}\n"
    if status and status != 128 + signal.SIGTERM:
        _tell(text, summary=text.strip() or f"exit status {status}", status=status, is_consequence=False)
    return status


def _record(error: BaseException, where: str) -> None:
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        plugins.report_error(error, where)
    _tell(text.getvalue(), summary=f"{type(error).__name__}: {first_line(error)}", status=1, is_consequence=_is_consequence(error))


def _tell(report: str, **about: Any) -> None:
    """Write what ends this rank for the launcher, and into the rank's own log; rank 0 has none but the terminal."""
    rank, file = settings.torchrun_rank(), settings.elastic_error_file()
    if rank is None or file is None or rank.rank != 0:
        print(report, end="", file=sys.stderr)
    if file is not None:
        unfinished = Path(f"{file}.unfinished")
        unfinished.write_text(json.dumps({"report": report, "time": time.time(), **about}), encoding="utf-8")
        unfinished.replace(file)


def _is_consequence(error: BaseException) -> bool:
    """Return whether an error comes out of torch's communication: then another rank's failure most likely was before it."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = bool(frames) and "/torch/distributed/" in frames[-1].filename.replace(os.sep, "/")
    return inside or (isinstance(error, RuntimeError) and any(word in str(error) for word in _GONE))


if __name__ == "__main__":
    main()
