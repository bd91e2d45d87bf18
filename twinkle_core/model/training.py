"""What happens to gradients: adding them up, clipping, stepping, and the counters of accumulation.

Gradients are held as sums over tokens and divided once, at the step, by the number of tokens that all micro-batches had. So a clip
works on `sum / count` without touching the sums otherwise, and another backward pass may still follow it.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from twinkle_core.data_format import IGNORE_INDEX
from twinkle_core.errors import ArgumentError, DataError, ModelError, NonFiniteLossError
from twinkle_core.model.adapter import AdapterState
from twinkle_core.model.optimizers import build_optimizer, check_rates
from twinkle_core.parallel import gradients as parallel
from twinkle_core.processor import MicroBatch

if TYPE_CHECKING:
    from twinkle_core.model.forward import ModuleRunner


def ensure_optimizer(state: AdapterState) -> torch.optim.Optimizer:
    """Return the state's optimizer, made with the defaults if none was set."""
    if state.optimizer is None:
        state.optimizer = build_optimizer(None, state.parameters.values(), {}, is_lora=state.is_lora)
    return state.optimizer


def next_lr(state: AdapterState) -> float:
    """Return the learning rate of the last step; before the first, that with which it will be made."""
    if state.lr is not None:
        return state.lr
    optimizer = state.optimizer or build_optimizer(None, state.parameters.values(), {}, is_lora=state.is_lora)
    return float(optimizer.param_groups[0]["lr"])


def add_gradients(state: AdapterState, batch: MicroBatch, loss: torch.Tensor, count: float) -> None:
    """Run the backward pass of one micro-batch; on several ranks also one without tokens, in which the others wait."""
    state.rows.extend(batch.row_ids)
    if loss.requires_grad and (count or not state.is_alone):
        (loss if state.scaler is None else loss * state.scaler.scale).backward()


@contextlib.contextmanager
def all_or_nothing(state: AdapterState) -> Iterator[None]:
    """Let the block add its gradients and be counted wholly, or not at all if it raises.

    Gradients of earlier calls, to which the block has added, cannot be told apart from its own any more: they are discarded too,
    and the error gets a note that says so.
    """
    rows = len(state.rows)
    try:
        with state.training.begun():
            yield
    except BaseException as error:
        if len(state.rows) > rows:  # else it has not come to a backward pass, or the gradients are discarded already
            if state.micro_steps:
                error.add_note(f"The gradients of {state.micro_steps} backward passes before this call are discarded as well, the "
                               "weights are unchanged. Accumulate them again.")
            state.discard_gradients(keep_forward=True)
        raise


def reopen(state: AdapterState) -> None:
    """Prepare gradients that a clip has reduced for another backward pass."""
    state.is_clipped = False
    if state.is_reduced and state.placed is not None:
        parallel.reopen(state.placed, state.parameters)
        state.is_reduced = False


def finish_gradients(state: AdapterState) -> None:
    """Reduce over the ranks what the backward passes have not. Gradients are then averages over the data ranks."""
    if state.placed is not None and not state.is_alone and not state.is_reduced:
        parallel.finish(state.placed, state.parameters)
        state.is_reduced = True


def clip_gradients(state: AdapterState, max_norm: float) -> float | None:
    """Scale the gradients so that their global L2 norm is at most `max_norm`; return the norm before, None if there is nothing.

    Raises: `NonFiniteLossError` if it is not finite and no loss scale is at work; the gradients are then discarded.
    Source: Pascanu et al. 2013, sec. 3.2.
    """
    norm, factor = _norm_and_factor(state, max_norm)
    if norm is not None and factor < 1.0:
        _scale(local_gradients(state), factor)
    return norm


def step(state: AdapterState, *, max_norm: float | None = None) -> bool:
    """Divide the gradients, clip them if `max_norm` is given, let the optimizer step, and clear them. Return whether it stepped.

    Raises: `ModelError` for a learning rate that the optimizer must not step with, before anything has changed;
        `NonFiniteLossError` for gradients that are not finite.
    """
    if not state.is_window_complete:
        return False
    if not state.grad_count:
        state.discard_gradients()
        return False
    optimizer = ensure_optimizer(state)
    check_rates(optimizer, state.scheduler)
    finish_gradients(state)
    held = local_gradients(state)
    norm, factor = _finite_norm(state), _data_ranks(state) / (state.grad_count * _scale_of(state))
    if state.scaler is not None:
        state.scaler.update(overflowed=norm is None)
    if norm is None:
        state.discard_gradients()
        return False
    if not state.is_clipped:  # else it is the norm after a clip, which noted that before it
        state.grad_norm = norm
    if max_norm is not None:
        state.clip = max_norm
        factor *= _factor(norm, max_norm)
    if factor != 1.0:
        _scale(held, factor)
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
    state.is_lr_step_due = False
    try:
        state.scheduler.step()
    except (ValueError, ArithmeticError, LookupError, TypeError) as error:
        raise ModelError(
            f"`{type(state.scheduler).__name__}` has no learning rate after step {state.step}: {type(error).__name__}: {error}. "
            "The weights took that step, and the learning rate stays. Set a scheduler that covers all steps.") from error
    return True


def local_gradients(state: AdapterState) -> list[torch.Tensor]:
    """Return this rank's parts of the gradients held."""
    return [parallel.local(parameter.grad) for parameter in state.parameters.values() if parameter.grad is not None]


def gradient_norm(state: AdapterState) -> float:
    """Return the global L2 norm of the gradients held, the same on every rank."""
    if state.placed is None or state.is_alone:
        return global_norm(local_gradients(state))
    return parallel.global_norm(state.placed, state.parameters)


def _data_ranks(state: AdapterState) -> int:
    """Return over how many ranks gradients are averaged: by that the sums are too small."""
    return 1 if state.placed is None else state.placed.data_world_size


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


def raise_not_finite(state: AdapterState, rows: Sequence[int | None], loss_sum: float, *, is_training: bool) -> NoReturn:
    """Raise `NonFiniteLossError` with the rows whose loss is NaN or infinite, and discard the gradients held.

    No rows mean that another rank had them.
    """
    where = shown_rows(rows) if rows else "The rows are those of another rank."
    if not is_training:
        raise NonFiniteLossError(f"The loss of this evaluation is {loss_sum}. {where} Look at these rows and at the weights.")
    state.discard_gradients()
    raise NonFiniteLossError(
        f"The loss at step {state.step + 1} is {loss_sum}. {where} The accumulated gradients are discarded, the weights unchanged. "
        "Look at these rows; try a lower learning rate, or `mixed_precision=\"no\"`.")


def _norm_and_factor(state: AdapterState, max_norm: float) -> tuple[float | None, float]:
    """Return the norm of the divided gradients and by what to scale them. The epsilon is that of torch's own clipping."""
    check_max_norm(max_norm)
    if not state.is_window_complete or not state.grad_count:
        return None, 1.0
    finish_gradients(state)
    state.clip = max_norm
    norm = _finite_norm(state)
    if norm is None:
        return math.inf, 1.0
    if not state.is_clipped:
        state.grad_norm = norm
    state.is_clipped = True
    return norm, _factor(norm, max_norm)


def _factor(norm: float, max_norm: float) -> float:
    return min(1.0, max_norm / (norm + 1e-6))


def _scale_of(state: AdapterState) -> float:
    return 1.0 if state.scaler is None else state.scaler.scale


def _finite_norm(state: AdapterState) -> float | None:
    """Return the norm of the divided gradients; None if it is not finite and a loss scale explains it.

    Raises: `NonFiniteLossError` if it is not finite and no loss scale is at work; the gradients are then discarded.
    """
    norm = gradient_norm(state) * _data_ranks(state) / (state.grad_count * _scale_of(state))
    if math.isfinite(norm):
        return norm
    if state.scaler is not None:
        return None
    rows = shown_rows(state.rows)
    state.discard_gradients()
    raise NonFiniteLossError(
        f"The gradient norm at step {state.step + 1} is {norm}, though the loss is finite. {rows} The gradients are discarded, "
        "the weights unchanged. Try a lower learning rate, or `mixed_precision=\"no\"`.")


def check_trained(
    runner: "ModuleRunner", rows: Sequence[int | None], *, count: float, num_tokens: float, tokens_read: float,
) -> None:
    """Raise `DataError` for a batch of which, over all data ranks, nothing is trained on; a rank's part of it may be such."""
    if tokens_read and not num_tokens:
        raise DataError(f"Nothing in this batch is trained on: no token but a first one has a label other than {IGNORE_INDEX}. "
                        f"{shown_rows(rows)} Look at how these rows were encoded, or leave them out.")
    if num_tokens and not count:
        runner.say_once(f"The loss counted none of the {int(num_tokens)} supervised tokens of a batch: it adds nothing to a step.")


def shown_rows(rows: Sequence[int | None]) -> str:
    """Return a sentence that names the rows of a batch, at most 20."""
    known = [str(row) for row in rows if row is not None]
    if not known:
        return f"The batch had {len(rows)} sequences (without row ids)."
    more = f" and {len(known) - 20} more" if len(known) > 20 else ""
    return f"Rows of the dataset in this batch: {', '.join(known[:20])}{more}."
