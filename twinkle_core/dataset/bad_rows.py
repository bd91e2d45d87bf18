"""What happens to a row that cannot be used, and what is said about it.

`on_bad_row="raise"` stops at the first, naming its number, file and line. `"skip"` leaves such rows out and tells how many and
why. A row is never replaced by another one.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from twinkle_core import session
from twinkle_core.errors import ArgumentError, DataError, TemplateError, TwinkleError

OnBadRow = Literal["raise", "skip"]
REASONS_SHOWN = 5


@dataclass
class Tally:
    """What became of the rows of one pass.

    Attributes:
        seen: rows looked at.
        skipped: reason -> rows left out by `on_bad_row="skip"`.
        examples: reason -> the first row left out for it.
        dropped: rows that truncation left without anything to train on.
    """

    seen: int = 0
    dropped: int = 0
    skipped: Counter[str] = field(default_factory=lambda: Counter[str]())
    examples: dict[str, str] = field(default_factory=lambda: dict[str, str]())

    def skip(self, reason: str, place: str) -> None:
        """Count a bad row."""
        self.skipped[reason] += 1
        self.examples.setdefault(reason, place)

    def add(self, other: "Tally") -> None:
        """Add the counts of another part of the pass."""
        self.seen += other.seen
        self.dropped += other.dropped
        self.skipped.update(other.skipped)
        self.examples = {**other.examples, **self.examples}

    def report(self, what: str) -> None:
        """Say what was left out, if anything was. Raises: `DataError` if nothing is left."""
        lines: list[str] = []
        if self.dropped:
            lines.append(f"{self.dropped} of {self.seen} rows were dropped by truncation (`max_length`, `truncation_strategy`): "
                         "nothing was left to train on")
        if self.skipped:
            lines.append(f"{self.skipped.total()} of {self.seen} rows were skipped (`on_bad_row=\"skip\"`):")
            lines += [f"  {count} x {reason} (first: {self.examples[reason]})"
                      for reason, count in self.skipped.most_common(REASONS_SHOWN)]
            if len(self.skipped) > REASONS_SHOWN:
                lines.append(f"  and {len(self.skipped) - REASONS_SHOWN} other reasons")
        if not lines:
            return
        text = "\n".join(lines)
        if self.dropped + self.skipped.total() >= self.seen:
            raise DataError(f"`{what}` leaves no row: {text}. Mend the rows, or use a larger `max_length`.")
        say(f"{what}: {text}")


@dataclass(frozen=True)
class Place:
    """Where the rows of a batch stand: the number of the first in the dataset, and their files and lines where known."""

    first_row: int
    origins: Sequence[str] | None

    def of(self, index: int) -> str:
        """Return "row 41 (chats.jsonl:42)" for a row of the batch."""
        origin = f" ({self.origins[index]})" if self.origins is not None and self.origins[index] is not None else ""
        return f"row {self.first_row + index}{origin}"

    def error(self, index: int, error: Exception, *, doing: str) -> TwinkleError:
        """Return `error` as one that names the row. Foreign exceptions are translated; `doing` says what was tried."""
        if isinstance(error, TemplateError):
            origin = f"({self.origins[index]}) " if self.origins is not None and self.origins[index] is not None else ""
            return TemplateError(f"{origin}{reason_of(error)}", row=self.first_row + index, turn=error.turn)
        return DataError(f"{doing} failed in {self.of(index)}: {reason_of(error)}")


def reason_of(error: Exception) -> str:
    """Return why a row is bad, without where: rows that are bad for one reason are counted together."""
    message = str(error.args[0]) if error.args else ""
    return message if isinstance(error, TwinkleError) else f"{type(error).__name__}: {message}"


def check_policy(on_bad_row: str, *, where: str) -> None:
    """Raise `ArgumentError` unless `on_bad_row` is one of the two policies."""
    if on_bad_row not in ("raise", "skip"):
        raise ArgumentError(f"`{where}(on_bad_row={on_bad_row!r})`: use \"raise\" or \"skip\".")


def each_row(
    rows: Sequence[Mapping[str, Any]], function: Callable[[Any], Any], place: Place, tally: Tally, *, on_bad_row: str, doing: str,
) -> tuple[list[Any], list[int]]:
    """Return `function` of every good row, and the positions of those rows.

    Raises: `DataError` naming the row, under the policy "raise". A user's function may raise anything; it is translated here.
    """
    results: list[Any] = []
    kept: list[int] = []
    for index, row in enumerate(rows):
        try:
            results.append(function(row))
        except Exception as error:  # the boundary to the user's function
            if on_bad_row == "raise":
                raise place.error(index, error, doing=doing) from error
            tally.skip(reason_of(error), place.of(index))
        else:
            kept.append(index)
    return results, kept


def say(text: str) -> None:
    """Write a line about the data to stderr, on the first rank only."""
    if session.current().launcher.topology().rank == 0:
        print(f"twinkle: {text}", file=sys.stderr)
