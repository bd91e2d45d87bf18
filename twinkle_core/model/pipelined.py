"""Running the micro-batches of one call through the stages of a pipeline.

The schedule wants micro-batches of one shape and at least as many as there are stages: rows are padded to the longest of the
call, and what is missing is filled by rows that are not trained on. The last stage computes the loss; what it found is handed to
the others.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from twinkle_core.data_format import IGNORE_INDEX, InputFeature, ModelOutput
from twinkle_core.loss.interface import Loss
from twinkle_core.model import training
from twinkle_core.model.adapter import AdapterState, Totals
from twinkle_core.model.forward import MicroResult, ModuleRunner
from twinkle_core.parallel import gradients
from twinkle_core.parallel.pipeline import Pipeline
from twinkle_core.parallel.ranks import DATA_AXES, Ranks
from twinkle_core.processor import Limits, MicroBatch


def run_pipelined(
    runner: ModuleRunner, pipeline: Pipeline, state: AdapterState, features: Sequence[Any], loss: Loss,
    loss_inputs: Mapping[str, Any], *, device: str, is_training: bool, closes_window: bool,
) -> tuple[ModelOutput, Totals]:
    """Run all micro-batches of `features`, with their backward passes if `is_training`, and return what they gave.

    `closes_window`: whether the backward passes are the last before the step.

    Raises: `NonFiniteLossError` on every rank if any micro-batch of any rank has a loss that is not finite.
    """
    ranks = state.placed.ranks  # type: ignore[union-attr]
    own = _micro_batches(state, features, loss_inputs, Limits.of(runner.module.config), ranks, device=device)
    batches = _of_one_shape([*own, *_fill(state, loss_inputs, ranks, len(own), device=device)], state)
    results: dict[int, MicroResult] = {}
    scale = state.scaler.scale if state.scaler is not None else 1.0

    def compute(index: int, hidden: torch.Tensor) -> torch.Tensor:
        results[index] = runner.from_hidden(hidden, batches[index], loss, scale=scale)
        return results[index].loss * scale

    with runner.mode(training=is_training), gradients.reducing_once(pipeline.placed, is_training and closes_window):
        pipeline.run([batch.input_ids_RL for batch in batches], [batch.position_ids_RL for batch in batches], compute,
                     is_training=is_training, dtype=runner.hidden_dtype())
    sums, bad_rows = [0.0, 0.0, 0.0, 0.0], list[int | None]()
    with state.noting(is_training=is_training) as note:
        for index, result in sorted(results.items()):
            batch, is_real = batches[index], index < len(own)
            if not math.isfinite(result.loss_sum):
                bad_rows += batch.row_ids
            elif is_real:
                note(batch, result)
            for place, number in enumerate((result.loss_sum, result.count, batch.num_tokens, sum(batch.lengths) * is_real)):
                sums[place] += number
        sums = ranks.sum_numbers(sums, *DATA_AXES, "pp")
        if not math.isfinite(sums[0]):
            training.raise_not_finite(state, bad_rows, sums[0], is_training=is_training)
        if is_training:
            rows = [row for batch in own for row in batch.row_ids]
            training.check_trained(runner, rows, count=sums[1], num_tokens=sums[2], tokens_read=sums[3])
    totals = Totals(loss_sum=sums[0], count=sums[1], num_tokens=int(sums[2]), tokens_read=int(sums[3]))
    logprobs = _shared_logprobs([results[index].logprobs for index in sorted(results)][:len(own)], own, ranks)
    return ModelOutput(loss=totals.loss, num_tokens=totals.num_tokens, logprobs=logprobs), totals


def _micro_batches(
    state: AdapterState, features: Sequence[Any], loss_inputs: Mapping[str, Any], limits: Limits, ranks: Ranks, *, device: str,
) -> list[MicroBatch]:
    processor = state.processor
    if processor.micro_batch_size is None and features:
        processor = copy.copy(processor)
        processor.micro_batch_size = -(-len(features) // ranks.size("pp"))
    return list(processor.micro_batches(features, loss_inputs, device=device, limits=limits))


def _fill(state: AdapterState, loss_inputs: Mapping[str, Any], ranks: Ranks, have: int, *, device: str) -> list[MicroBatch]:
    """Return empty micro-batches, so that every data rank has as many and every stage has something to do."""
    count = max(ranks.max_number(have, *DATA_AXES), ranks.size("pp"))
    if ranks.mesh.vpp > 1:  # the interleaved schedule runs them in rounds of one a stage
        count = -(-count // ranks.size("pp")) * ranks.size("pp")
    return [empty_batch(state, loss_inputs, device) for _ in range(count - have)]


def empty_batch(state: AdapterState, loss_inputs: Mapping[str, Any], device: str) -> MicroBatch:
    """Return a row that is not trained on, for a rank that has none."""
    row = InputFeature(input_ids=[state.processor.pad_token_id] * 2, labels=[IGNORE_INDEX] * 2)
    inputs = {name: _of_nothing(value) for name, value in loss_inputs.items()}
    return state.processor.collate([row], inputs, device=device)


def _of_nothing(value: Any) -> Any:
    """Return the input of a loss for a row of two tokens that is not trained on, like `value`: one entry, or one a token."""
    if not isinstance(value, list | tuple):
        return value
    if not value or not isinstance(value[0], list | tuple):
        return [0.0]
    return [[{}, {}]] if value[0] and isinstance(value[0][0], Mapping) else [[0.0, 0.0]]


def _of_one_shape(batches: Sequence[MicroBatch], state: AdapterState) -> list[MicroBatch]:
    """Pad rows and number of rows to the largest of the call."""
    rows = max(batch.input_ids_RL.shape[0] for batch in batches)
    length = max(batch.input_ids_RL.shape[1] for batch in batches)
    return [_padded(batch, rows, length, state.processor.pad_token_id) for batch in batches]


def _padded(batch: MicroBatch, rows: int, length: int, pad: int) -> MicroBatch:
    own_rows, own_length = batch.input_ids_RL.shape
    missing = (0, length - own_length, 0, rows - own_rows)
    ids = torch.nn.functional.pad(batch.input_ids_RL, missing, value=pad)
    positions = None if batch.position_ids_RL is None else torch.nn.functional.pad(batch.position_ids_RL, missing)
    source = batch.source_N // own_length * length + batch.source_N % own_length
    return replace(batch, input_ids_RL=ids, position_ids_RL=positions, source_N=source)


def _shared_logprobs(found: Sequence[list[list[float]]], own: Sequence[MicroBatch], ranks: Ranks) -> list[list[float]]:
    """Return the log-probabilities of this rank's sequences, which the last stage has found."""
    lengths = [length for batch in own for length in batch.lengths]
    flat = [number for batch in found for sequence in batch for number in sequence]
    numbers = iter(ranks.from_last_stage(flat, sum(lengths)))
    return [[next(numbers) for _ in range(length)] for length in lengths]
