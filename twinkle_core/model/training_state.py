"""What `resume_from_checkpoint` needs beside the weights: optimizer, scheduler, counters, held gradients and random state.

Everything is checked by `read` before `apply` changes anything. Tensors are in safetensors under the names of the parameters they
belong to, the rest in JSON. The gradients of an open accumulation window are kept, so a run that is resumed in mid-window takes the
same step as one that was not interrupted.
"""

import copy
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from twinkle_core import session
from twinkle_core.checkpoint.codec import read_json, write_json
from twinkle_core.checkpoint.random_state import collect_random_state, restore_random_state
from twinkle_core.checkpoint.tensor_file import Stream, write_tensors
from twinkle_core.errors import CheckpointError
from twinkle_core.model.adapter import AdapterState
from twinkle_core.model.precision import LossScaler
from twinkle_core.model.training import ensure_optimizer
from twinkle_core.warning import warn

FOLDER = "training_state"
"""A folder of its own, because inference engines read every `*.safetensors` beside the weights as weights."""

_STATE, _OPTIMIZER, _GRADIENTS = "state.json", "optimizer.safetensors", "gradients.safetensors"
COUNTERS = ("step", "micro_steps", "grad_count", "is_lr_step_due", "grad_norm", "lr", "clip")
SEPARATOR = "::"
"""Between the name of a parameter and the name of a part of its optimizer state."""

_SHAPED = tuple(f"{SEPARATOR}{part}" for part in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"))
"""State of torch's optimizers that has its parameter's shape."""


@dataclass(frozen=True, kw_only=True)
class SavedTraining:
    """What was read of a checkpoint and fits: counters and so on as they were saved, the optimizer's state as it takes it."""

    values: dict[str, Any]
    optimizer: dict[str, Any] | None
    gradients: dict[str, torch.Tensor]
    random_state: dict[str, Any] | None


def write(folder: Path, state: AdapterState, *, stream: Stream | None = None) -> None:
    """Write the training state into `folder/training_state`. `stream` gives what `state` has without memory.

    Raises: `CheckpointError` for state that JSON cannot hold.
    """
    target = folder / FOLDER
    target.mkdir()
    values: dict[str, Any] = {name: getattr(state, name) for name in COUNTERS}
    values["world_size"] = session.current().launcher.topology().world_size
    values["scaler"] = None if state.scaler is None else asdict(state.scaler)
    values["optimizer"], values["scheduler"] = None, None
    tensors: dict[str, torch.Tensor] = {}
    if state.optimizer is not None:
        values["optimizer"], tensors = _optimizer_values(state.optimizer, state.parameters)
    if state.scheduler is not None:
        values["scheduler"] = {"class": type(state.scheduler).__name__, "state": dict(state.scheduler.state_dict())}
    write_tensors(target / _OPTIMIZER, tensors, stream=stream)
    save_file({name: parameter.grad.detach().cpu().contiguous() for name, parameter in state.parameters.items()
               if parameter.grad is not None and state.micro_steps}, target / _GRADIENTS)
    for rank, random_state in (state.random_states or {session.current().launcher.topology().rank: collect_random_state()}).items():
        write_json(target / _random_file(rank), random_state, what="random state")
    write_json(target / _STATE, values, what="training state")


Load = Callable[[Path], dict[str, torch.Tensor]]
"""Reads a safetensors file: name -> tensor."""


def optimizer_file(folder: Path) -> Path:
    """Return the file that holds the optimizer's tensors in a checkpoint."""
    return folder / FOLDER / _OPTIMIZER


def read(folder: Path, state: AdapterState, *, load: Load = load_file) -> SavedTraining:
    """Return the training state of a checkpoint after holding it against what the script has set. Nothing is changed.

    `load` reads the tensors; one that returns hollow ones is enough to see whether they fit.

    Raises: `CheckpointError` naming the file that is missing, or what differs.
    """
    source = folder / FOLDER
    values = read_json(_existing(source / _STATE))
    try:
        return _read(folder, values, state, load)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"The training state in `{source}` was changed or is damaged: {type(error).__name__}: {error}. Use "
                              "another checkpoint, or take the weights only: `load`. Nothing was changed.") from error


def _read(folder: Path, values: dict[str, Any], state: AdapterState, load: Load) -> SavedTraining:
    source = folder / FOLDER
    tensors, gradients = load(_existing(source / _OPTIMIZER)), load(_existing(source / _GRADIENTS))
    if wrong := [name for name in COUNTERS if not _is_counter(name, values[name])]:
        raise ValueError(f"`{wrong[0]}` is {values[wrong[0]]!r}")
    _check_optimizer(folder, values["optimizer"], state)
    scheduler = None if state.scheduler is None else type(state.scheduler).__name__
    _check_class(folder, "scheduler", (values["scheduler"] or {}).get("class"), scheduler, "set_lr_scheduler")
    if (values["scaler"] is None) != (state.scaler is None):
        words = ("without", "with") if values["scaler"] is None else ("with", "without")
        raise CheckpointError(f"`{folder}` was trained {words[0]} a loss scale (fp16), this model trains {words[1]} one. "
                              "Use the same `mixed_precision` and `dtype`, or take the weights only: `load`.")
    if unknown := sorted(set(gradients) - set(state.parameters)):
        raise CheckpointError(f"`{source / _GRADIENTS}` has a gradient of `{unknown[0]}`, which this model does not train.")
    _check_tensors(gradients, state.parameters)
    optimizer = None
    if values["optimizer"] is not None:
        _check_tensors({name: tensor for name, tensor in tensors.items() if name.endswith(_SHAPED)}, state.parameters)
        optimizer = _optimizer_state(ensure_optimizer(state), values["optimizer"], tensors, state.parameters)
    if state.scheduler is not None:
        copy.copy(state.scheduler).load_state_dict(copy.deepcopy(values["scheduler"]["state"]))
        if type(values["scheduler"]["state"]["last_epoch"]) is not int:
            raise ValueError("`last_epoch` of the scheduler is not an integer")
    if values["scaler"] is not None:
        LossScaler(**values["scaler"]).update(overflowed=False)  # a trial: of its own, with whatever the file holds
    _other_settings(values, state)
    return SavedTraining(values=values, optimizer=optimizer, gradients=gradients, random_state=_read_random_state(source, values))


def apply(saved: SavedTraining, state: AdapterState) -> None:
    """Put a training state that `read` returned into place."""
    state.discard_gradients()
    values = saved.values
    if other := _other_settings(values, state):
        warn(f"Training goes on with what the checkpoint says, not with what this script sets: {'; '.join(other)}. To "
                      "train with other settings, take the weights only: `load`.")
    if saved.optimizer is not None:
        ensure_optimizer(state).load_state_dict(saved.optimizer)
    elif state.optimizer is not None:  # saved before the first step
        state.optimizer.state.clear()
    if state.scheduler is not None:
        state.scheduler.load_state_dict(values["scheduler"]["state"])
    if state.scaler is not None:
        state.scaler = LossScaler(**values["scaler"])
    for name in COUNTERS:
        setattr(state, name, values[name])
    for name, gradient in saved.gradients.items():
        state.parameters[name].grad = gradient.to(state.parameters[name].device)
    if saved.random_state is not None:
        restore_random_state(saved.random_state)


def size_bytes(state: AdapterState) -> int:
    """Return about how large the training state is on disk."""
    held = [parameter.grad for parameter in state.parameters.values() if parameter.grad is not None and state.micro_steps]
    if state.optimizer is not None:
        held += [value for entry in state.optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def _optimizer_values(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter],
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups = [{**{key: value for key, value in group.items() if key not in ("params", "param_names")},
               "params": [names[id(parameter)] for parameter in group["params"]]} for group in optimizer.param_groups]
    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, dict[str, Any]] = {}
    seen: set[int] = set()
    for parameter, entry in optimizer.state.items():
        name = names[id(parameter)]
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                exact = value if value.device.type == "meta" else value.detach().cpu().contiguous()
                is_shared = exact.data_ptr() in seen  # safetensors refuses two names for one memory
                tensors[f"{name}{SEPARATOR}{key}"] = exact.clone() if is_shared else exact
                seen.add(exact.data_ptr())
            else:
                others.setdefault(name, {})[key] = value
    return {"class": type(optimizer).__name__, "groups": groups, "others": others}, tensors


def _optimizer_state(
    optimizer: torch.optim.Optimizer, values: dict[str, Any], tensors: dict[str, torch.Tensor],
    parameters: Mapping[str, torch.nn.Parameter],
) -> dict[str, Any]:
    """Return what `Optimizer.load_state_dict` takes, with the parameters numbered as this optimizer has them."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    numbers: dict[str, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            numbers[names[id(parameter)]] = len(numbers)
    entries: dict[int, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition(SEPARATOR)
        entries.setdefault(numbers[name], {})[part] = tensor
    for name, others in values["others"].items():
        entries.setdefault(numbers[name], {}).update(others)
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in values["groups"]]
    return {"state": entries, "param_groups": groups}


def _check_optimizer(folder: Path, values: dict[str, Any] | None, state: AdapterState) -> None:
    if values is None:
        return
    optimizer = ensure_optimizer(state)
    _check_class(folder, "optimizer", values["class"], type(optimizer).__name__, "set_optimizer")
    names = {id(parameter): name for name, parameter in state.parameters.items()}
    present = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    saved = [group["params"] for group in values["groups"]]
    if present != saved:
        sizes = [len(group) for group in saved], [len(group) for group in present]
        pairs = zip(itertools.chain(*saved), itertools.chain(*present), strict=False)
        first = next((pair for pair in pairs if pair[0] != pair[1]), None)
        detail = (f"`{first[0]}` stands where this script has `{first[1]}`" if first else
                  f"groups of {sizes[0]} parameters, here {sizes[1]}")
        raise CheckpointError(f"The optimizer in `{folder}` has other parameter groups than this script's: {detail}. Build the "
                              "optimizer as the run that saved it did, or take the weights only: `load`.")


def _is_counter(name: str, value: Any) -> bool:
    if name == "is_lr_step_due":
        return isinstance(value, bool)
    if name in ("step", "micro_steps"):
        return type(value) is int and value >= 0
    return type(value) in (int, float) or (value is None and name in ("grad_norm", "lr"))


def _check_tensors(tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise `ValueError` if a tensor, named by its parameter, has not that parameter's shape."""
    for key, tensor in tensors.items():
        shape = parameters[key.rpartition(SEPARATOR)[0] or key].shape
        if tensor.shape != shape:
            raise ValueError(f"`{key}` has shape {tuple(tensor.shape)}, the parameter {tuple(shape)}")


def _other_settings(values: dict[str, Any], state: AdapterState) -> list[str]:
    """Return settings of optimizer and scheduler in which the script differs from a checkpoint, for people."""
    found: list[str] = []
    if values["optimizer"] is not None:
        moved = {"params", "initial_lr"} | ({"lr", "betas", "momentum"} if state.scheduler is not None else set())
        groups = list(zip(values["optimizer"]["groups"], ensure_optimizer(state).param_groups, strict=True))
        found += [f"{key}={saved[key]} (script: {present[key]})" for saved, present in groups
                  for key in saved if key in present and key not in moved and saved[key] != present[key]]
        found += [f"lr={saved['initial_lr']} (script: {present['initial_lr']})" for saved, present in groups
                  if saved.get("initial_lr") != present.get("initial_lr")]
    if state.scheduler is not None:
        saved, present = values["scheduler"]["state"], state.scheduler.state_dict()
        said = set(inspect.signature(type(state.scheduler)).parameters) - {"last_epoch"}
        found += [f"{key}={saved[key]} (script: {present[key]})" for key in sorted(said & set(saved) & set(present))
                  if saved[key] != present[key]]
    return list(dict.fromkeys(found))


def _check_class(folder: Path, what: str, saved: str | None, present: str | None, method: str) -> None:
    if saved == present:
        return
    if saved is None:
        raise CheckpointError(f"`{folder}` was saved without a {what}, this script sets `{present}`. Call `{method}` after "
                              "resuming, or leave it out.")
    found = "sets none" if present is None else f"sets `{present}`"
    raise CheckpointError(f"`{folder}` was saved with the {what} `{saved}`, this script {found}. Call "
                          f"`{method}(\"{saved}\", ...)` before `resume_from_checkpoint`, as the run that saved it did, or take "
                          "the weights only: `load`.")


def _read_random_state(source: Path, values: dict[str, Any]) -> dict[str, Any] | None:
    world_size = session.current().launcher.topology().world_size
    if values["world_size"] != world_size:
        warn(f"The checkpoint was saved by {values['world_size']} processes and is resumed by {world_size}: their random "
                      "states do not fit, so dropout draws other numbers than the uninterrupted run.")
        return None
    file = source / _random_file(session.current().launcher.topology().rank)
    saved, present = read_json(_existing(file)), collect_random_state()
    try:
        restore_random_state(saved)  # a trial: what is wrong with it shows before anything else has changed
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"`{file}` holds no random state: {type(error).__name__}: {error}. The checkpoint "
                              "is damaged; use another one.") from error
    finally:
        restore_random_state(present)
    return saved


def _random_file(rank: int) -> str:
    return f"rng_rank{rank}.json"


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise CheckpointError(f"`{path}` is missing: the checkpoint is incomplete and cannot be resumed. Use another one, or take "
                              "the weights only: `load`.")
    return path
