"""What a loss returned, held against what a loss must return, so that a mistake in one is named before it reaches the weights."""

import math
from typing import Any

import torch

from twinkle_core.errors import ModelError
from twinkle_core.loss.interface import Loss, LossForMetrics


def loss_name(loss: Loss) -> str:
    """Return what people call `loss`: its class, or the function in it."""
    loss = loss.loss if isinstance(loss, LossForMetrics) else loss
    return getattr(getattr(loss, "function", None), "__name__", type(loss).__name__)


def checked_result(loss: Loss, result: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (sum, count) as scalar tensors on the sum's device.

    Raises: `ModelError` unless `result` is a tensor with one real floating number, and a real number or a tensor with one.
    """
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], torch.Tensor) or result[0].numel() != 1:
        raise ModelError(f"The loss `{loss_name(loss)}` returned {_short(result)}. Return (sum, count): a tensor with one number, "
                         "and how many tokens it is the sum over.")
    value, count = result
    if not value.is_floating_point():
        raise ModelError(f"The loss `{loss_name(loss)}` returned a sum of dtype {value.dtype}, which has no gradient to train "
                         "with. Return a real floating number, computed from `outputs.logprobs`.")
    is_number = isinstance(count, int | float) or (
        isinstance(count, torch.Tensor) and count.numel() == 1 and not count.is_complex())
    if not is_number:
        raise ModelError(f"The loss `{loss_name(loss)}` returned {_short(count)} as its count. Return one number: how many tokens "
                         "the sum is over, e.g. `(targets != -100).sum()`.")
    return value, torch.as_tensor(count, device=value.device)


def check_count(loss: Loss, count: float) -> None:
    """Raise `ModelError` unless `count` is a finite number >= 0: gradients are divided by it."""
    if not math.isfinite(count) or count < 0:
        raise ModelError(f"The loss `{loss_name(loss)}` returned the count {count}, by which gradients are divided. Return how "
                         "many tokens the sum is over: a finite number >= 0, e.g. `(targets != -100).sum()`.")


def _short(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    if isinstance(result, tuple):
        return f"a {type(result).__name__} of {len(result)} entries"
    return "None" if result is None else f"a {type(result).__name__}"
