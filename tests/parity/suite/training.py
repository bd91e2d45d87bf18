"""What every rank does in a run of the suite, and what it hands in.

Rows are ragged and follow a rule that can be learnt. Their number divides by no number of ranks: with 7 rows a batch and a last
batch of one, some rank is without rows in every epoch.
"""

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import twinkle
from suite import faults
from suite.cases import LONG, SHORT, Case
from suite.families import VOCABULARY
from twinkle.dataloader import DataLoader
from twinkle.model import TransformersModel
from twinkle_core.mesh import DeviceMesh
from twinkle_core.model.adapter import AdapterState
from twinkle_core.parallel.gathering import whole_tensor
from twinkle_core.parallel.gradients import local

BATCH_ROWS, ACCUMULATION, MICRO_BATCH_ROWS = 7, 2, 3
MAX_NORM = 0.1
EPSILON = 1e-5  # Adam divides by |gradient| + epsilon: with a smaller one, entries that are rounding errors would move weights
LORA = {"r": 4, "lora_alpha": 2, "target_modules": "all-linear", "init_lora_weights": False}  # B is not zero, so A has a gradient

Arrays = dict[str, np.ndarray]


@dataclass(kw_only=True)
class Outcome:
    """What a rank hands in.

    Attributes:
        steps: (step, loss, grad_norm) of each step.
        logprobs: of each batch, and of the last one in an evaluation: for each row of this rank, of each token.
        gradients: of the first step unless resumed, after the clip, divided by the number of tokens: whole tensors by name.
        parameters: at the end, trained or not.
        data_rank: which slice of each batch this rank had.
    """

    steps: list[tuple[int, float, float]] = field(default_factory=list)
    logprobs: list[list[list[float]]] = field(default_factory=list)
    gradients: Arrays = field(default_factory=dict)
    parameters: Arrays = field(default_factory=dict)
    data_rank: int = 0


def train(case: Case, model_folder: str) -> Outcome:
    """Train as `case` says, on this rank."""
    mesh = DeviceMesh.parse(case.mesh) if case.mesh else None
    with faults.put_in(case.fault):
        twinkle.initialize(mode="local", global_device_mesh=mesh)
        model = build_model(case, model_folder)
        loader = DataLoader(rows(case.steps), batch_size=BATCH_ROWS, shuffle=case.shuffle)
        if case.resume:
            loader.resume_from_checkpoint(model.resume_from_checkpoint(case.folder))
        outcome = Outcome(data_rank=mesh.data_rank(_rank(model)) if mesh else 0)
        for number, batch in enumerate(loader, 1):
            outcome.logprobs.append(model.forward_backward(inputs=batch)["logprobs"])
            if not case.said and number % ACCUMULATION:
                if case.peek:
                    model.clip_grad_norm(math.inf)
                continue
            if not outcome.steps and not case.resume and model.clip_grad_norm(MAX_NORM) is not None:
                outcome.gradients = _gradients(model.state())
                has_stepped = model.step()
            else:
                has_stepped = model.clip_grad_and_step(MAX_NORM)
            if has_stepped:
                metrics = model.calculate_metric(is_training=True)
                outcome.steps.append((int(metrics["step"]), metrics["loss"], metrics["grad_norm"]))
                if metrics["step"] == case.save_after:
                    model.save("checkpoint", case.folder, with_optimizer=True)
        outcome.logprobs.append(model.forward_only(inputs=batch)["logprobs"])
        outcome.parameters = _whole(model.state(), dict(model.module.named_parameters()))
    return outcome


def held_after_one_backward(case: Case, model_folder: str) -> Arrays:
    """Return the gradients that parameters of this rank hold after the first of two backward passes, as they are."""
    twinkle.initialize(mode="local", global_device_mesh=DeviceMesh.parse(case.mesh))
    model = build_model(case, model_folder)
    model.forward_backward(inputs=next(iter(DataLoader(rows(case.steps), batch_size=BATCH_ROWS))))
    held = {name: parameter.grad for name, parameter in model.state().parameters.items()}
    return {name: local(grad).numpy() for name, grad in held.items() if grad is not None}


def rows(steps: int) -> list[dict[str, Any]]:
    """Return the rows of `steps` steps: a prompt, and in each row a token follows from the one before it alone."""
    draw = random.Random(3)
    count = BATCH_ROWS * ACCUMULATION * steps - (BATCH_ROWS - 1)
    made: list[dict[str, Any]] = []
    for row in range(count):
        ids = list(itertools.islice(_chain(draw.randrange(VOCABULARY)), draw.choice((3, 5, 8, 11, 16, 21))))
        prompt = draw.randrange(len(ids) // 2 + 1)
        made.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:], "row_id": row})
    return made


def _chain(token: int) -> Iterator[int]:
    while True:
        yield token
        token = (5 * token + 3) % 4  # few tokens, so that five steps are enough to learn something


def build_model(case: Case, folder: str) -> TransformersModel:
    accumulation = ACCUMULATION if case.said else 1
    model = TransformersModel(folder, device="cpu", gradient_accumulation_steps=1 if case.lora else accumulation,
                              gradient_checkpointing=case.checkpointing)
    if case.lora:
        model.add_adapter_to_model("default", {**LORA, "lora_dropout": case.dropout}, gradient_accumulation_steps=accumulation)
    model.set_optimizer("AdamW", lr=_lr(case), eps=EPSILON)
    model.set_processor(micro_batch_size=None if case.steps >= LONG else MICRO_BATCH_ROWS)  # fewer are faster
    return model


def _lr(case: Case) -> float:
    """Return a rate at which the loss falls by a fifth in few steps, and small rounding errors stay small in many."""
    if not case.lora:
        return 2e-3
    return 1.2e-2 if case.steps <= SHORT else 3e-3


def _gradients(state: AdapterState) -> Arrays:
    """Return the mean gradients of all tokens of a step. Held are sums over tokens, averaged over the data ranks."""
    factor = (1 if state.placed is None else state.placed.data_world_size) / state.grad_count
    whole = _whole(state, {name: parameter.grad for name, parameter in state.parameters.items()})
    return {name: array * factor for name, array in whole.items()}


def _whole(state: AdapterState, parts: Mapping[str, Any]) -> Arrays:
    """Return whole tensors of what this rank has parts of; a pipeline stage has only some."""
    found: Arrays = {}
    for name, part in parts.items():
        if part is None:
            continue
        whole = part.detach() if state.placed is None else whole_tensor(state.placed, name, part.detach())
        found[name] = whole.numpy(force=True).copy()
    return found


def _rank(model: TransformersModel) -> int:
    from twinkle_core import session

    return session.current().launcher.topology().rank
