"""Running a script again after it failed: `python -m twinkle_ray.attempt RESTARTS SCRIPT [ARGS...]`.

Each attempt is a new process, so it begins with nothing of the one before; the groups of a failed one are given back when its
process ends. A script that calls `resume_from_checkpoint` goes on where its last checkpoint was.
"""

import signal
import subprocess
import sys
from collections.abc import Sequence

from twinkle_core.launchers.local import end_on_sigterm
from twinkle_core.launchers.script import run_script


def run_again(restarts: int, script: str, argv: Sequence[str]) -> int:
    """Run `script` in new processes until one ends well or `restarts` more have failed; return the last exit status."""
    status = 0
    for attempt in range(restarts + 1):
        if attempt:
            print(f"The script failed with exit status {status}. Running it again (restart {attempt} of {restarts}).",
                  file=sys.stderr)
        status = _run(script, argv)
        if status in (0, 128 + signal.SIGINT, 128 + signal.SIGTERM):  # done, or somebody wants it to end
            break
    return status


def _run(script: str, argv: Sequence[str]) -> int:
    process = subprocess.Popen([sys.executable, "-m", "twinkle_ray.attempt", "0", script, *argv])
    previous = signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
    try:
        status = process.wait()
    except KeyboardInterrupt:  # the terminal has told the child too
        status = process.wait() or 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, previous)
    return status if status >= 0 else 128 - status


def main() -> int:
    """Do what the command line says."""
    restarts, script, *argv = sys.argv[1:]
    if int(restarts):
        return run_again(int(restarts), script, argv)
    end_on_sigterm()
    return run_script(script, argv)


if __name__ == "__main__":
    sys.exit(main())
