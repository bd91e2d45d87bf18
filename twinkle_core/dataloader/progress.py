"""Shows how far an epoch is: step, loss, learning rate, tokens a second and time left, on stderr of the first rank.

On a terminal it is a bar of `rich`, elsewhere (a log file) a line for about every tenth of the epoch. The numbers are those that
`calculate_metric` reported last; what nothing has reported is not shown.
"""

import math
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

from twinkle_core import session

LINES = 10
"""Lines an epoch, where there is no terminal."""


class Progress(Protocol):
    """What the loop tells."""

    def advance(self) -> None:
        """Say that one more step is done."""
        ...

    def close(self) -> None:
        """Say that the loop is over, however it ended. Called once."""
        ...


def open_progress(epoch: Mapping[str, Any]) -> Progress:
    """Return the display for an epoch, as `DataLoader.begin_epoch` describes it: a silent one where none is wanted."""
    if not epoch["progress"] or session.current().launcher.topology().rank != 0:
        return _Silent()
    kind = _Bar if sys.stderr.isatty() else _Lines
    return kind(f"epoch {epoch['number']}", total=epoch["steps"], done=epoch["done"])


def describe(metrics: Mapping[str, float]) -> str:
    """Return loss, learning rate and speed as text: "loss 1.234  lr 1.0e-04  1,234 tok/s"."""
    parts: list[str] = []
    if "loss" in metrics:
        parts.append(f"loss {metrics['loss']:.4g}")
    if "lr" in metrics:
        parts.append(f"lr {metrics['lr']:.2e}")
    if "tokens_per_s" in metrics:
        parts.append(f"{metrics['tokens_per_s']:,.0f} tok/s")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Return "1:02:03", or "2:03" below an hour."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Silent:
    def advance(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Lines:
    def __init__(self, name: str, *, total: int, done: int) -> None:
        self._name = name
        self._total = total
        self._done = done
        self._begin_done = done
        self._begin = time.monotonic()

    def advance(self) -> None:
        self._done += 1
        tenth = self._done * LINES // self._total
        if tenth > (self._done - 1) * LINES // self._total:
            elapsed = time.monotonic() - self._begin
            left = elapsed / (self._done - self._begin_done) * (self._total - self._done)
            numbers = describe(session.current().latest_metrics)
            parts = (f"{self._name} step {self._done}/{self._total}", numbers, f"{duration(left)} left")
            print("  ".join(part for part in parts if part), file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class _Bar:
    def __init__(self, name: str, *, total: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(elapsed_when_finished=True), TextColumn("{task.fields[clock]}"), console=Console(stderr=True),
            redirect_stdout=sys.stdout.isatty())  # a redirected stdout stays the user's
        self._task = self._bar.add_task(name, total=total, completed=done, numbers="", clock="left")
        self._total, self._done = total, done
        self._bar.start()

    def advance(self) -> None:
        self._done += 1
        clock = "took" if self._done >= self._total else "left"
        self._bar.update(self._task, advance=1, numbers=describe(session.current().latest_metrics), clock=clock)

    def close(self) -> None:
        self._bar.stop()
