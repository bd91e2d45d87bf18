"""Jobs in which something goes wrong on several ranks: what is refused, and a rank that is killed while it saves."""

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np

import twinkle
from suite.cases import Case
from suite.training import ACCUMULATION, BATCH_ROWS, MAX_NORM, build_model, rows
from twinkle.dataloader import DataLoader
from twinkle.model import TransformersModel
from twinkle_core import session
from twinkle_core.checkpoint.folder import CheckpointWriter
from twinkle_core.errors import TwinkleError
from twinkle_core.mesh import DeviceMesh
from twinkle_core.parallel.gradients import local


def refusal(case: Case, model_folder: str, action: str) -> str:
    """Do `action` after one of two backward passes, and return what the error says; "" if there is none."""
    model, loader = _started(case, model_folder)
    batch = next(iter(loader))
    model.forward_backward(inputs=batch)
    return _error_of(lambda: ACTIONS[action](model, batch, case))


def refused_resume(case: Case, model_folder: str) -> tuple[str, bool]:
    """Resume from a checkpoint that is damaged; return what the error says and whether all weights are as before."""
    model, _ = _started(case, model_folder)
    before = _weights(model)
    text = _error_of(lambda: model.resume_from_checkpoint(f"{case.folder}/checkpoint"))
    after = _weights(model)
    return text, all(np.array_equal(array, after[name]) for name, array in before.items())


def killed_in_save(case: Case, model_folder: str) -> None:
    """Save after every step; be killed, on the rank that writes, when the second save is all but done."""
    model, loader = _started(case, model_folder)
    for number, batch in enumerate(loader, 1):
        model.forward_backward(inputs=batch)
        if model.clip_grad_and_step(MAX_NORM):
            if number > ACCUMULATION:
                CheckpointWriter._claim = lambda self: os.kill(os.getpid(), signal.SIGKILL)
            model.save("checkpoint", case.folder, with_optimizer=True)


def fail_on(rank: int) -> int:
    """Raise on one rank, and return the number of the others."""
    twinkle.initialize(mode="local")
    own = session.current().launcher.topology().rank
    if own == rank:
        raise ValueError(f"rank {rank} is unhappy")
    return own


def _started(case: Case, model_folder: str) -> tuple[TransformersModel, DataLoader]:
    twinkle.initialize(mode="local", global_device_mesh=DeviceMesh.parse(case.mesh))
    return build_model(case, model_folder), DataLoader(rows(case.steps), batch_size=BATCH_ROWS)


def _error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except TwinkleError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _weights(model: TransformersModel) -> dict[str, np.ndarray]:
    return {name: local(parameter.detach()).clone().numpy() for name, parameter in model.module.named_parameters()}


ACTIONS: dict[str, Callable[[TransformersModel, list[Any], Case], object]] = {
    "save in a window": lambda model, batch, case: model.save("checkpoint", case.folder),
    "add an adapter": lambda model, batch, case: (
        model.forward_backward(inputs=batch), model.step(), model.add_adapter_to_model("late", {"r": 2})),
    "forward": lambda model, batch, case: model.forward(inputs=batch),
    "load no rows": lambda model, batch, case: list(DataLoader([])),
}
