"""Where the ranks of one node write, and what is shown when one fails. Imported only where torch is."""

import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


class RankLogs(LogsSpecs):
    """Rank 0 writes to the terminal, rank N to `folder/rank_N.txt`, both streams in order; errors to files of their own."""

    def __init__(self, folder: Path, *, error_folder: Path) -> None:
        super().__init__(log_dir=str(folder))
        self._folder = folder
        self._error_folder = error_folder
        self._attempt = -1

    @property
    def root_log_dir(self) -> str:
        """The folder of `rank_N.txt`."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files of this attempt; called by the agent before it starts the ranks, again after a restart."""
        self._attempt += 1
        if self._attempt:
            self._show_restart()
        outputs = dict.fromkeys(envs, "")
        errors: dict[int, str] = {}
        for local_rank, env in envs.items():
            rank = int(env["RANK"])
            errors[local_rank] = str(self._error_folder / f"attempt_{self._attempt}_rank_{rank}.json")
            env["TORCHELASTIC_ERROR_FILE"] = errors[local_rank]
            if rank != 0:
                self._folder.mkdir(parents=True, exist_ok=True)
                outputs[local_rank] = str(self._folder / f"rank_{rank}.txt")
        nothing = dict.fromkeys(envs, "")
        return LogsDest(stdouts=outputs, stderrs=outputs, tee_stdouts=nothing, tee_stderrs=nothing, error_files=errors)

    def report(self, failures: Mapping[int, ProcessFailure]) -> int:
        """Print how the rank that failed first failed, and return the exit status of the run."""
        killed = [rank for rank, failure in failures.items() if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM]
        first = min(killed) if killed else min(failures, key=lambda rank: _time(failures[rank].error_file_data))
        failure = failures[first]
        others = f"; the other ranks were stopped. Output of rank N: {self._folder}/rank_N.txt"
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            print(f"Rank {first} was killed by signal {-failure.exitcode} ({name}){others}.", file=sys.stderr)
            return 128 - failure.exitcode
        text = _report(failure.error_file_data)
        if text:
            print(f"Rank {first} failed{others}.\n{text}", end="", file=sys.stderr)
        else:
            print(f"Rank {first} ended with exit status {failure.exitcode}{others}.", file=sys.stderr)
        return failure.exitcode

    def _show_restart(self) -> None:
        previous = sorted(self._error_folder.glob(f"attempt_{self._attempt - 1}_rank_*.json"), key=lambda path: _time(_read(path)))
        reason = f":\n{_report(_read(previous[0])).rstrip()}" if previous else ", without a Python error."
        print(f"A rank failed{reason}\nRunning the script again (restart {self._attempt}).", file=sys.stderr)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _time(data: Any) -> float:
    """Return when an error file of `rank` was written, in seconds since 1970; infinity for what is none."""
    return float(data["time"]) if "time" in data else float("inf")


def _report(data: Any) -> str:
    return str(data["message"]["extraInfo"]["py_callstack"]) if "time" in data else ""
