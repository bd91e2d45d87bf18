"""Running the micro-batches of one call, in step with the other ranks.

Every data rank runs as many micro-batches as the one that has most: a rank without rows fills up with a row that is not trained on,
so that nobody waits in a collective for somebody who has nothing to do.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from twinkle_core.data_format import ModelOutput
from twinkle_core.loss.interface import Loss
from twinkle_core.model import training
from twinkle_core.model.adapter import AdapterState, Totals
from twinkle_core.model.forward import MicroResult, ModuleRunner
from twinkle_core.model.pipelined import empty_batch
from twinkle_core.parallel import gradients
from twinkle_core.parallel.ranks import DATA_AXES
from twinkle_core.processor import Limits, MicroBatch

Each = Callable[[MicroBatch, MicroResult], None]


def run_batches(
    runner: ModuleRunner, state: AdapterState, features: Sequence[Any], loss: Loss, loss_inputs: Mapping[str, Any], *,
    device: str, is_training: bool, closes_window: bool, each: Each, top: int = 0,
) -> tuple[ModelOutput, Totals]:
    """Run all micro-batches of `features` and return what they gave; `loss` is the token mean over all data ranks.

    Args:
        runner: runs the module.
        state: whose processor, scale and ranks are used.
        features: this rank's.
        loss: the loss.
        loss_inputs: what it gets beside outputs and targets.
        device: where the tensors are put.
        is_training: with gradients, and dropout on.
        closes_window: whether a backward pass of the last micro-batch is the last before the step.
        each: called after every micro-batch; a backward pass belongs there.
        top: so many of the likeliest tokens are wanted in each supervised place.

    Raises:
        NonFiniteLossError: on every rank, if any micro-batch of any rank has a loss that is not finite.
        DataError: a feature that the model cannot read; on every rank, if there is nothing to train on.
    """
    scale = state.scaler.scale if state.scaler is not None else 1.0
    sums = [0.0, 0.0, 0.0, 0.0]
    bad_rows: list[int | None] = []
    bad_loss = 0.0
    logprobs: list[list[float]] = []
    top_logprobs: list[list[dict[int, float]]] = []
    rows: list[int | None] = []
    limits = Limits.of(runner.module.config)
    with state.noting(is_training=is_training) as note:
        for batch, is_real, is_last in _in_step(state, features, loss_inputs, limits, device=device):
            with gradients.reducing(state.placed, is_last and closes_window):
                result = runner.run(batch, loss, training=is_training, scale=scale, top=top)
                if not math.isfinite(result.loss_sum):
                    bad_loss, bad_rows = result.loss_sum, list(batch.row_ids)
                    if state.is_alone:
                        break
                each(batch, result)
            if is_real:
                logprobs.extend(result.logprobs)
                top_logprobs.extend(result.top_logprobs)
                rows.extend(batch.row_ids)
                if not bad_rows:
                    note(batch, result)
            for index, number in enumerate((result.loss_sum, result.count, batch.num_tokens, sum(batch.lengths) * is_real)):
                sums[index] += number
        sums = sums if state.placed is None else state.placed.ranks.sum_numbers(sums, *DATA_AXES)
        if bad_rows or not math.isfinite(sums[0]):
            training.raise_not_finite(state, bad_rows, bad_loss or sums[0], is_training=is_training)
        if is_training:
            training.check_trained(runner, rows, count=sums[1], num_tokens=sums[2], tokens_read=sums[3])
    totals = Totals(loss_sum=sums[0], count=sums[1], num_tokens=int(sums[2]), tokens_read=int(sums[3]))
    output = ModelOutput(loss=totals.loss, num_tokens=totals.num_tokens, logprobs=logprobs)
    if top:
        output["top_logprobs"] = top_logprobs
    return output, totals


def _in_step(
    state: AdapterState, features: Sequence[Any], loss_inputs: Mapping[str, Any], limits: Limits, *, device: str,
) -> Iterator[tuple[MicroBatch, bool, bool]]:
    """Yield (micro-batch, whether it holds rows of this rank, whether it is the last)."""
    if state.is_alone:
        following = state.processor.micro_batches(features, loss_inputs, device=device, limits=limits)
        current = next(following, None)
        while current is not None:
            after = next(following, None)
            yield current, True, after is None
            current = after
        return
    ranks = state.placed.ranks  # type: ignore[union-attr]
    own = list(state.processor.micro_batches(features, loss_inputs, device=device, limits=limits))
    count = ranks.max_number(len(own), *DATA_AXES)
    for index in range(count):
        is_real = index < len(own)
        yield own[index] if is_real else empty_batch(state, loss_inputs, device), is_real, index == count - 1
