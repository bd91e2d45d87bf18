"""The two answers of preference pairs in the rows of a micro-batch, which alternate: the chosen one, then the rejected one.

Notation: B rows, T positions, P pairs. This module only names torch's types: it imports nothing heavy.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def split_pairs(numbers_b: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """Return the numbers of the chosen and of the rejected answers, [P] each; a row alone, with which a rank waits, is no pair."""
    pairs = numbers_b.shape[0] // 2
    return numbers_b[: 2 * pairs: 2], numbers_b[1: 2 * pairs: 2]


def answer_logprobs(logprobs: "torch.Tensor", mask_bt: "torch.Tensor") -> "torch.Tensor":
    """Return the sums [B] over supervised tokens of log-probabilities a token [B, T]; sums stay as they are."""
    return logprobs if logprobs.ndim == 1 else logprobs.masked_fill(~mask_bt, 0.0).sum(1)
