"""What `twinkle launch --mode torchrun` runs as each rank: `python -m twinkle_core.launchers.rank SCRIPT [ARGS...]`.

An error that ends the script is written, as it would be shown, to the file that the agent names, together with its time. The
agent's side shows the first one of all ranks (`rank_logs`).
"""

import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path

from twinkle_core import plugins, settings
from twinkle_core.launchers.script import run_script


def main() -> None:
    """Run the script that the command line names, and end the process with its status."""
    status = run_script(sys.argv[1], sys.argv[2:], on_error=_record)
    if status:
        # Without `atexit`: leaving a process group properly waits for ranks that may never come.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _record(error: BaseException, where: str) -> None:
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        plugins.report_error(error, where)
    rank, file = settings.torchrun_rank(), settings.elastic_error_file()
    if rank is None or file is None or rank.rank != 0:
        print(text.getvalue(), end="", file=sys.stderr)
    if file is not None:
        # The keys under "message" are those that torch's agent expects.
        message = {"message": str(error), "extraInfo": {"py_callstack": text.getvalue(), "timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": message, "time": time.time()}), encoding="utf-8")


if __name__ == "__main__":
    main()
