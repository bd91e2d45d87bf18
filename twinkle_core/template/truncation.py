"""What becomes of a sequence that is longer than `max_length`."""

from typing import Literal, get_args

from twinkle_core.data_format import IGNORE_INDEX
from twinkle_core.errors import ArgumentError, TemplateError, did_you_mean, listing

TruncationStrategy = Literal["raise", "left", "right", "split", "delete"]
STRATEGIES: tuple[str, ...] = get_args(TruncationStrategy)


def check_truncation(max_length: int | None, strategy: str) -> None:
    """Raise `ArgumentError` for values that mean nothing."""
    if strategy not in STRATEGIES:
        raise ArgumentError(f"`truncation_strategy={strategy!r}`: use one of {listing(STRATEGIES)}."
                            f"{did_you_mean(str(strategy), STRATEGIES)}")
    if max_length is not None and (isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1):
        raise ArgumentError(f"`max_length={max_length!r}`: use an integer >= 1, or None for no limit.")


def truncate(
    ids: list[int], labels: list[int] | None, *, max_length: int | None, strategy: TruncationStrategy, row: int | None,
) -> list[tuple[list[int], list[int] | None]]:
    """Return what is left of one sequence: it itself if it is short enough, nothing, or several pieces.

    "left" cuts from the left, "right" from the right, "split" makes pieces of `max_length` tokens, "delete" leaves nothing.
    A piece in which nothing is left to learn (the first token has no predecessor to be predicted from) is left out. `labels` is
    None for a prompt.

    Raises: `TemplateError` if the sequence is too long and the strategy is "raise", or "split" for a prompt.
    """
    length = len(ids)
    if max_length is None or length <= max_length:
        return [(ids, labels)]
    if strategy == "raise" or (strategy == "split" and labels is None):
        what = "row" if labels is not None else "prompt"
        others = "`left`, `right`, `split` or `delete`" if labels is not None else "`left`, `right` or `delete`"
        raise TemplateError(f"the {what} has {length} tokens, `max_length` is {max_length} and `truncation_strategy` is "
                            f"`{strategy}`. Raise `max_length` to {length} or more, or set `truncation_strategy` to {others}.",
                            row=row)
    if strategy == "delete":
        return []
    if strategy == "left":
        ranges = [(length - max_length, length)]
    elif strategy == "right":
        ranges = [(0, max_length)]
    else:
        ranges = [(at, min(at + max_length, length)) for at in range(0, length, max_length)]
    if labels is None:
        return [(ids[low:high], None) for low, high in ranges]
    pieces = [(ids[low:high], labels[low:high]) for low, high in ranges]
    return [piece for piece in pieces if any(label != IGNORE_INDEX for label in piece[1][1:])]
