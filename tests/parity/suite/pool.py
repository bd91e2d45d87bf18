"""A pool of ranks that live as long as the tests: starting eight processes that import torch costs more than most runs.

A job is a function of `suite` and its arguments, run on the first ranks of the pool at the same time, each with the environment
that torchrun sets; the store where they meet is a new one for each job, held here as torchrun's agent holds it.
"""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SIZE = 8
_GRACE_S = 5.0
"""How long the other ranks may take to notice that one has failed; then all are started again."""


class RankFailedError(Exception):
    """A rank raised, ended or did not answer in time."""


class Pool:
    """Ranks that run jobs.

    Args:
        log: file for what they write.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._numbers = itertools.count()
        self._connections: list[Connection] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline = -1

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: int, timeout_s: float = 200.0) -> list[Any]:
        """Run `function(*arguments)` on the first `ranks` of the pool and return what each returned.

        One rank runs without torchrun's environment.

        Raises: `RankFailedError` with the traceback of the first rank that failed. The pool can be used on.
        """
        from torch.distributed import TCPStore

        if self._process is None or self._process.poll() is not None:
            self._start()
        number = next(self._numbers)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        for rank in range(ranks):
            environ = {} if ranks == 1 else _environ(number, rank, ranks, store.port)
            self._connections[rank].send((function, arguments, environ))
        return self._collect(ranks, timeout_s)

    def close(self) -> None:
        """End all ranks, whatever they are doing."""
        if self._process is None:
            return
        os.close(self._lifeline)
        for connection in self._connections:
            connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process, self._connections = None, []

    def _start(self) -> None:
        self.close()
        pairs = [socket.socketpair() for _ in range(SIZE)]
        read, self._lifeline = os.pipe()
        theirs = [pair[1].fileno() for pair in pairs]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "suite.worker", str(read), *map(str, theirs)], cwd=Path(__file__).parent.parent,
                pass_fds=[read, *theirs], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"})
        os.close(read)
        self._connections = [Connection(pair[0].detach()) for pair in pairs]
        for pair in pairs:
            pair[1].close()

    def _collect(self, ranks: int, timeout_s: float) -> list[Any]:
        waiting: dict[Any, int] = {self._connections[rank]: rank for rank in range(ranks)}
        answers: dict[int, Any] = {}
        failure = ""
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready: list[Any] = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                silent = sorted(waiting.values())
                raise RankFailedError(failure or f"Ranks {silent} did not answer in {timeout_s} s.\n{self._tail()}")
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    is_well, answers[rank] = connection.recv()
                except (EOFError, ConnectionResetError):
                    self.close()
                    raise RankFailedError(failure or f"Rank {rank} is gone.\n{self._tail()}") from None
                if not is_well and not failure:
                    failure = f"Rank {rank} failed:\n{answers[rank]}"
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if failure:
            raise RankFailedError(failure)
        return [answers[rank] for rank in range(ranks)]

    def _tail(self) -> str:
        return self._log.read_text("utf-8", "replace")[-3000:]


def _environ(job: int, rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return what torchrun would set."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port,
               "TORCHELASTIC_RESTART_COUNT": 0}
    return {**{name: str(number) for name, number in numbers.items()}, "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RUN_ID": f"job_{job}", "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
