"""Components of the tests that live on ranks. They import no torch, so that ranks start fast."""

import os
from typing import Any

from twinkle_core.remote import RemoteComponent, remote_function


class Rows(RemoteComponent):
    """Makes, changes and counts rows."""

    def __init__(self, start: int = 0, remote_group: str | None = None, device_mesh: Any = None) -> None:
        self.total = start + 0

    @remote_function(dispatch="slice_dp", collect="flatten")
    def double(self, rows: list[Any], *, weights: list[int] | None = None) -> list[Any]:
        self.total += len(rows)
        return [row * 2 for row in rows] if weights is None else [row * weight for row, weight in zip(rows, weights, strict=True)]

    @remote_function(dispatch="slice_dp", collect="none")
    def received(self, rows: Any, **others: Any) -> Any:
        return (rows, others) if others else rows

    @remote_function(execute="first")
    def make(self, count: int, size: int = 1) -> list[Any]:
        return ["x" * size for _ in range(count)] if size > 1 else list(range(count))

    @remote_function(dispatch="slice_dp", collect="flatten")
    def blobs(self, rows: list[int]) -> list["Blob"]:
        return [Blob(row) for row in rows]

    @remote_function(collect="sum")
    def count(self) -> int:
        return self.total

    @remote_function(collect="none")
    def variables(self, *names: str) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    @remote_function(collect="none")
    def pid(self) -> int:
        return os.getpid()

    @remote_function(lazy_collect=True)
    def lazy(self, value: Any) -> Any:
        return value

    @remote_function()
    def fail(self, error: BaseException, *, on_rank: int | None = None, block: bool = False) -> None:
        if on_rank in (None, int(os.environ["RANK"])):
            raise error
        if block:
            import threading

            threading.Event().wait(600)

    @remote_function()
    def use(self, other: Any, name: str) -> Any:
        return getattr(other, name)()

    @remote_function()
    def is_same(self, other: Any) -> bool:
        return other is self

    @remote_function()
    def end(self, *, on_rank: int = 1) -> None:
        if int(os.environ["RANK"]) == on_rank:
            os._exit(3)
        import threading

        threading.Event().wait(600)


class Blob:
    """A large object that knows where it was unpickled last."""

    size = 3_000_000

    def __init__(self, row: int, seen: tuple[int, ...] = ()) -> None:
        self.row = row
        self.seen = seen
        self.data = bytes(self.size)

    def __reduce__(self) -> Any:
        return _opened, (self.row, self.seen, self.data)


def _opened(row: int, seen: tuple[int, ...], data: bytes) -> Blob:
    return Blob(row, (*seen, os.getpid()))
