"""Where the ranks of one node write, and which of them failed first, and how. Imported only where torch is."""

import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from twinkle_core.errors import ArgumentError


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a rank failed.

    Attributes:
        what: e.g. "Rank 1 was killed by signal 9 (SIGKILL)".
        status: exit status of the run.
        report: what the rank would have shown, such as a traceback; "" if there is nothing.
        summary: its last word in one line, e.g. "ValueError: unhappy".
        is_consequence: whether it only says that another rank was not there any more.
    """

    what: str
    status: int
    report: str = ""
    summary: str = ""
    is_consequence: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return what other nodes need to know."""
        return {name: value for name, value in asdict(self).items() if name != "report"}


class RankLogs(LogsSpecs):
    """Rank 0 writes to the terminal, rank N to `folder/rank_N.txt`, both streams in order; errors to files of their own.

    A restart leaves what was written before it in `rank_N.0.txt`, `rank_N.1.txt`, ...
    """

    def __init__(self, folder: Path, *, error_folder: Path) -> None:
        super().__init__(log_dir=str(folder))
        self.folder = folder
        self._error_folder = error_folder
        self._attempt = -1
        self._errors: dict[int, Path] = {}

    @property
    def root_log_dir(self) -> str:
        """The folder of `rank_N.txt`."""
        return str(self.folder)

    def check_writable(self) -> None:
        """Make the folder. Raises: `ArgumentError` if ranks could not write there."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / ".twinkle-probe"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ArgumentError(f"The folder `{self.folder}`, where rank N writes `rank_N.txt`, cannot be written to: {error}. "
                                "Start the run in a folder that can.") from error

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files of this attempt; called by the agent before it starts the ranks, again after a restart."""
        self._attempt += 1
        ranks = {local_rank: int(env["RANK"]) for local_rank, env in envs.items()}
        outputs = {local_rank: str(self.folder / f"rank_{rank}.txt") if rank else "" for local_rank, rank in ranks.items()}
        self._errors = {rank: self._error_folder / f"attempt_{self._attempt}_rank_{rank}.json" for rank in ranks.values()}
        if self._attempt:  # the new ranks begin new files
            for rank in filter(None, ranks.values()):
                log = self.folder / f"rank_{rank}.txt"
                log.replace(log.with_suffix(f".{self._attempt - 1}.txt"))
        errors = {local_rank: str(self._errors[rank]) for local_rank, rank in ranks.items()}
        for local_rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = errors[local_rank]
        nothing = dict.fromkeys(envs, "")
        return LogsDest(stdouts=outputs, stderrs=outputs, tee_stdouts=nothing, tee_stderrs=nothing, error_files=errors)

    def first_failure(self, statuses: Mapping[int, int]) -> Failure:
        """Return the failure that most likely led to the others.

        An error of a rank's own comes before a death without one, and that before an error which says that another rank is gone;
        among errors the first in time counts.

        Args:
            statuses: rank -> exit status, of those that have failed; negative for a signal.
        """
        records = {rank: record for rank, path in self._errors.items() if (record := _read(path)) is not None}
        own = [rank for rank in records if not records[rank]["is_consequence"]]
        silent = [rank for rank in statuses if rank not in records]
        if silent and not own:
            return _death(min(silent), statuses[min(silent)])
        rank = min(own or records, key=lambda rank: records[rank]["time"])
        record = records[rank]
        what = f"Rank {rank} failed" if record["report"] else f"Rank {rank} ended with exit status {record['status']}"
        return Failure(what=what, status=record["status"], report=record["report"], summary=record["summary"],
                       is_consequence=record["is_consequence"])


def show(failure: Failure, logs: RankLogs, *, is_alone: bool) -> None:
    """Print how a rank failed. `is_alone`: it is the only rank of the run."""
    if is_alone and failure.report:
        print(failure.report, end="", file=sys.stderr)
        return
    others = "" if is_alone else f"; the other ranks were stopped. Output of rank N: {logs.folder}/rank_N.txt"
    print(f"{failure.what}{others}.\n{failure.report}", end="", file=sys.stderr)


def _death(rank: int, status: int) -> Failure:
    """Return the failure of a rank that left no word."""
    number = -status if status < 0 else status - 128  # 128 + N is how a rank ends that answers to signal N
    if status < 0 or number == signal.SIGTERM:
        names = {entry.value: entry.name for entry in signal.Signals}
        return Failure(what=f"Rank {rank} was killed by signal {number} ({names.get(number, 'unknown')})", status=128 + number)
    return Failure(what=f"Rank {rank} ended with exit status {status}", status=status)


def _read(path: Path) -> dict[str, Any] | None:
    """Return what `rank` wrote; None where there is nothing, or what something else wrote."""
    try:
        record: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return cast("dict[str, Any]", record) if isinstance(record, dict) and "is_consequence" in record else None
