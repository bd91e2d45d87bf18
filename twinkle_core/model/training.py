"""What happens to gradients: adding them up, clipping, stepping, and the counters of accumulation.

Gradients are held as sums over tokens and divided once, at the step, by the number of tokens that all micro-batches had. So a clip
works on `sum / count` without touching the sums otherwise, and another backward pass may still follow it.
"""

import math
from collections.abc import Sequence

import torch

from twinkle_core.errors import ArgumentError, NonFiniteLossError
from twinkle_core.model.adapter import AdapterState
from twinkle_core.model.optimizers import build_optimizer
from twinkle_core.model.precision import overflows
from twinkle_core.processor import MicroBatch


def ensure_optimizer(state: AdapterState) -> torch.optim.Optimizer:
    """Return the state's optimizer, made with the defaults if none was set."""
    if state.optimizer is None:
        state.optimizer = build_optimizer(None, state.parameters.values(), {}, is_lora=state.is_lora)
    return state.optimizer


def add_gradients(state: AdapterState, loss: torch.Tensor, count: float) -> None:
    """Run the backward pass of one micro-batch; `count` is added to what the step divides by."""
    if count and loss.requires_grad:
        (loss if state.scaler is None else loss * state.scaler.scale).backward()
        state.grad_count += count


def clip_gradients(state: AdapterState, max_norm: float) -> float | None:
    """Scale the gradients so that their global L2 norm is at most `max_norm`; return the norm before, None if there is nothing.

    Raises: `NonFiniteLossError` if it is not finite and no loss scale is at work; the gradients are then discarded.
    Source: Pascanu et al. 2013, sec. 3.2.
    """
    norm, factor = _norm_and_factor(state, max_norm)
    if norm is not None and factor < 1.0:
        _scale(gradients(state), factor)
    return norm


def step(state: AdapterState, *, max_norm: float | None = None) -> bool:
    """Divide the gradients, clip them if `max_norm` is given, let the optimizer step, and clear them. Return whether it stepped."""
    if not state.is_window_complete:
        return False
    held = gradients(state)
    if not held or not state.grad_count:
        state.discard_gradients()
        return False
    factor = 1.0
    if max_norm is not None:
        _, factor = _norm_and_factor(state, max_norm)
    factor /= state.grad_count
    if state.scaler is not None:
        factor /= state.scaler.scale
        overflowed = overflows(global_norm(held))
        state.scaler.update(overflowed=overflowed)
        if overflowed:
            state.discard_gradients()
            return False
    if factor != 1.0:
        _scale(held, factor)
    optimizer = ensure_optimizer(state)
    state.lr = float(optimizer.param_groups[0]["lr"])
    optimizer.step()
    state.step += 1
    state.is_lr_step_due = True
    state.discard_gradients()
    return True


def advance_scheduler(state: AdapterState) -> bool:
    """Advance the scheduler if the optimizer has stepped since it was advanced last. Return whether it did."""
    if state.scheduler is None or not state.is_lr_step_due:
        return False
    state.scheduler.step()
    state.is_lr_step_due = False
    return True


def gradients(state: AdapterState) -> list[torch.Tensor]:
    """Return the gradients held."""
    return [parameter.grad for parameter in state.parameters.values() if parameter.grad is not None]


def global_norm(tensors: Sequence[torch.Tensor]) -> float:
    """Return the L2 norm of all elements, computed in fp32 or wider."""
    if not tensors:
        return 0.0
    wide = [tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float() for tensor in tensors]
    return float(torch.nn.utils.get_total_norm(wide))


def _scale(tensors: list[torch.Tensor], factor: float) -> None:
    torch._foreach_mul_(tensors, factor)  # pyright: ignore[reportPrivateImportUsage] - one kernel for all, as torch's own clipping


def check_max_norm(max_norm: object) -> None:
    """Raise `ArgumentError` unless `max_norm` is a number > 0."""
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm > 0:
        raise ArgumentError(f"`max_norm={max_norm!r}`: use a number > 0, or `float('inf')` to measure the norm without clipping.")


def check_finite(state: AdapterState, batch: MicroBatch, loss_sum: float, *, is_training: bool) -> None:
    """Raise `NonFiniteLossError` with the batch's rows if its loss is NaN or infinite, and discard the gradients held."""
    if math.isfinite(loss_sum):
        return
    if not is_training:
        raise NonFiniteLossError(f"The loss of this evaluation is {loss_sum}. {shown_rows(batch.row_ids)} Look at these rows and "
                                 "at the weights.")
    state.discard_gradients()
    raise NonFiniteLossError(
        f"The loss at step {state.step + 1} is {loss_sum}. {shown_rows(batch.row_ids)} The accumulated gradients are discarded, "
        "the weights unchanged. Look at these rows; try a lower learning rate, or `mixed_precision=\"no\"`.")


def _norm_and_factor(state: AdapterState, max_norm: float) -> tuple[float | None, float]:
    """Return the norm of the divided gradients and by what to scale them. The epsilon is that of torch's own clipping."""
    check_max_norm(max_norm)
    held = gradients(state)
    if not state.is_window_complete or not held or not state.grad_count:
        return None, 1.0
    state.clip = max_norm
    norm = global_norm(held) / (state.grad_count * (1.0 if state.scaler is None else state.scaler.scale))
    if not math.isfinite(norm):
        if state.scaler is not None:
            return norm, 1.0
        rows = shown_rows(state.rows)
        state.discard_gradients()
        raise NonFiniteLossError(
            f"The gradient norm at step {state.step + 1} is {norm}, though the loss is finite. {rows} The gradients are discarded, "
            "the weights unchanged. Try a lower learning rate, or `mixed_precision=\"no\"`.")
    state.grad_norm = norm
    return norm, min(1.0, max_norm / (norm + 1e-6))


def shown_rows(rows: Sequence[int | None]) -> str:
    """Return a sentence that names the rows of a batch, at most 20."""
    known = [str(row) for row in rows if row is not None]
    if not known:
        return f"The batch had {len(rows)} sequences (without row ids)."
    more = f" and {len(known) - 20} more" if len(known) > 20 else ""
    return f"Rows of the dataset in this batch: {', '.join(known[:20])}{more}."
