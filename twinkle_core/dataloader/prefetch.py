"""Fetches batches ahead of the loop in threads.

Rows of an encoded dataset lie in memory, and fetching them costs far less than a step: leave `num_workers` at 0. Threads pay when a
dataset of the user's own computes or reads its rows in `__getitem__`, or lives on another machine.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

AHEAD = 2
"""Batches that wait, a thread: one being used up and one ready is enough to keep a thread busy."""

Fetch = Callable[[Sequence[int]], list[dict[str, Any]]]


class Source:
    """Gives the batches of one epoch, in order."""

    def __init__(self, fetch: Fetch, batches: Sequence[Sequence[int]], *, num_workers: int) -> None:
        self._fetch = fetch
        self._rest = deque(batches)
        self._waiting: deque[Future[list[dict[str, Any]]]] = deque()
        self._room = AHEAD * num_workers
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="twinkle-data") if num_workers else None

    def next(self) -> list[dict[str, Any]] | None:
        """Return the next batch, or None at the end. Raises: what fetching raises, at the batch that it concerns."""
        if self._threads is None:
            return self._fetch(self._rest.popleft()) if self._rest else None
        self._submit()
        if not self._waiting:
            return None
        first = self._waiting.popleft()
        self._submit()  # so that the threads work while the loop uses this batch
        return first.result()

    def _submit(self) -> None:
        assert self._threads is not None, "only called with threads"
        while self._rest and len(self._waiting) < self._room:
            self._waiting.append(self._threads.submit(self._fetch, self._rest.popleft()))

    def close(self) -> None:
        """Stop the threads; what they have fetched is discarded."""
        self._rest.clear()
        self._waiting.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
