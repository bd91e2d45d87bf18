"""Runs a function over the batches of a table, here or in `num_proc` processes, and gives the results in order.

The processes are started for the call and end with it. Each gets the function and the rows once, at its start: by the fork where
that is how the platform starts processes, else pickled.
"""

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any, TypeVar

from twinkle_core import settings
from twinkle_core.dataset.table import CHUNK_ROWS, arrow_rows
from twinkle_core.errors import ArgumentError, DataError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

R = TypeVar("R")
_job: Any = None  # in a worker process: (part, function, first row)


def over_batches(
    part: "datasets.Dataset", function: "Callable[[pa.Table, int], R]", *, num_proc: int | None, first_row: int,
) -> Iterator[R]:
    """Yield `function(rows, number of the first row)` for consecutive batches of `part`, whose first row is `first_row`.

    Raises: `ArgumentError` for a `num_proc` that is no count; `DataError` if a process dies; what `function` raises.
    """
    if num_proc is not None and (not isinstance(num_proc, int) or isinstance(num_proc, bool) or num_proc < 1):
        raise ArgumentError(f"`num_proc={num_proc!r}`: use a number of processes >= 1, or leave it out.")
    workers = min(num_proc or 1, len(part))
    size = max(1, min(CHUNK_ROWS, -(-len(part) // workers))) if workers else CHUNK_ROWS
    ranges = [range(start, min(start + size, len(part))) for start in range(0, len(part), size)]
    if workers <= 1:
        for rows in ranges:
            yield function(arrow_rows(part, slice(rows.start, rows.stop)), first_row + rows.start)
        return
    job = (part, function, first_row)
    with settings.tokenizers_in_one_thread(), ProcessPoolExecutor(workers, initializer=_start, initargs=job) as pool:
        try:
            yield from pool.map(_run, ranges)
        except BrokenProcessPool as error:
            raise DataError(f"One of the {workers} processes (`num_proc`) died, most likely for lack of memory: use a smaller "
                            f"`num_proc`, or none.{_guard_advice()}") from error


def _guard_advice() -> str:
    if multiprocessing.get_start_method() == "fork":
        return ""
    return (" Here processes begin by importing the script: what it runs must stand under `if __name__ == \"__main__\":`, or each "
            "of them runs it too, and dies.")


def _start(part: Any, function: Any, first_row: int) -> None:
    global _job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends its processes without their tracebacks
    _job = (part, function, first_row)


def _run(rows: range) -> Any:
    part, function, first_row = _job
    return function(arrow_rows(part, slice(rows.start, rows.stop)), first_row + rows.start)
