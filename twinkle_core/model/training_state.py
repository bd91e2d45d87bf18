"""What `resume_from_checkpoint` needs beside the weights: optimizer, scheduler, counters, held gradients and random state.

Everything is checked by `read` before `apply` changes anything. Tensors are in safetensors under the names of the parameters they
belong to, the rest in JSON. The gradients of an open accumulation window are kept, so a run that is resumed in mid-window takes the
same step as one that was not interrupted.
"""

import inspect
import itertools
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from twinkle_core import session
from twinkle_core.checkpoint.codec import read_json, write_json
from twinkle_core.checkpoint.random_state import collect_random_state, restore_random_state
from twinkle_core.errors import CheckpointError
from twinkle_core.model.adapter import AdapterState
from twinkle_core.model.precision import LossScaler
from twinkle_core.model.training import ensure_optimizer

FOLDER = "training_state"
"""A folder of its own, because inference engines read every `*.safetensors` beside the weights as weights."""

_STATE, _OPTIMIZER, _GRADIENTS = "state.json", "optimizer.safetensors", "gradients.safetensors"
_COUNTERS = ("step", "micro_steps", "grad_count", "is_lr_step_due", "grad_norm", "lr", "clip")
_SEPARATOR = "::"


@dataclass(frozen=True, kw_only=True)
class SavedTraining:
    """What was read of a checkpoint and fits: `counters` and so on as they were saved, tensors by parameter name."""

    values: dict[str, Any]
    optimizer: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    random_state: dict[str, Any] | None


def write(folder: Path, state: AdapterState) -> None:
    """Write the training state into `folder/training_state`. Raises: `CheckpointError` for state that JSON cannot hold."""
    target = folder / FOLDER
    target.mkdir()
    values: dict[str, Any] = {name: getattr(state, name) for name in _COUNTERS}
    values["world_size"] = session.current().launcher.topology().world_size
    values["scaler"] = None if state.scaler is None else asdict(state.scaler)
    values["optimizer"], values["scheduler"] = None, None
    tensors: dict[str, torch.Tensor] = {}
    if state.optimizer is not None:
        values["optimizer"], tensors = _optimizer_values(state.optimizer, state.parameters)
    if state.scheduler is not None:
        values["scheduler"] = {"class": type(state.scheduler).__name__, "state": dict(state.scheduler.state_dict())}
    save_file(tensors, target / _OPTIMIZER)
    save_file({name: parameter.grad.detach().cpu().contiguous() for name, parameter in state.parameters.items()
               if parameter.grad is not None and state.micro_steps}, target / _GRADIENTS)
    for rank, random_state in (state.random_states or {session.current().launcher.topology().rank: collect_random_state()}).items():
        write_json(target / _random_file(rank), random_state, what="random state")
    write_json(target / _STATE, values, what="training state")


def read(folder: Path, state: AdapterState) -> SavedTraining:
    """Return the training state of a checkpoint after holding it against what the script has set. Nothing is changed.

    Raises: `CheckpointError` naming the file that is missing, or what differs.
    """
    source = folder / FOLDER
    values = read_json(_existing(source / _STATE))
    saved = SavedTraining(
        values=values, optimizer=load_file(_existing(source / _OPTIMIZER)), gradients=load_file(_existing(source / _GRADIENTS)),
        random_state=_read_random_state(source, values))
    _check_optimizer(folder, values["optimizer"], state)
    scheduler = None if state.scheduler is None else type(state.scheduler).__name__
    _check_class(folder, "scheduler", (values["scheduler"] or {}).get("class"), scheduler, "set_lr_scheduler")
    if (values["scaler"] is None) != (state.scaler is None):
        words = ("without", "with") if values["scaler"] is None else ("with", "without")
        raise CheckpointError(f"`{folder}` was trained {words[0]} a loss scale (fp16), this model trains {words[1]} one. "
                              "Use the same `mixed_precision` and `dtype`, or take the weights only: `load`.")
    if unknown := sorted(set(saved.gradients) - set(state.parameters)):
        raise CheckpointError(f"`{source / _GRADIENTS}` has a gradient of `{unknown[0]}`, which this model does not train.")
    return saved


def apply(saved: SavedTraining, state: AdapterState) -> None:
    """Put a training state that `read` returned into place."""
    state.discard_gradients()
    values = saved.values
    if other := _other_settings(values, state):
        warnings.warn(f"Training goes on with what the checkpoint says, not with what this script sets: {'; '.join(other)}. To "
                      "train with other settings, take the weights only: `load`.", stacklevel=4)
    if values["optimizer"] is not None:
        optimizer = ensure_optimizer(state)
        optimizer.load_state_dict(_optimizer_state(optimizer, values["optimizer"], saved.optimizer, state.parameters))
    elif state.optimizer is not None:  # saved before the first step
        state.optimizer.state.clear()
    if state.scheduler is not None:
        state.scheduler.load_state_dict(values["scheduler"]["state"])
    if state.scaler is not None:
        state.scaler = LossScaler(**values["scaler"])
    for name in _COUNTERS:
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
                exact = value.detach().cpu().contiguous()
                is_shared = exact.data_ptr() in seen  # safetensors refuses two names for one memory
                tensors[f"{name}{_SEPARATOR}{key}"] = exact.clone() if is_shared else exact
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
        name, _, part = key.rpartition(_SEPARATOR)
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


def _other_settings(values: dict[str, Any], state: AdapterState) -> list[str]:
    """Return settings of optimizer and scheduler in which the script differs from a checkpoint, for people."""
    found: list[str] = []
    if values["optimizer"] is not None:
        moved = {"params", "initial_lr"} | ({"lr", "betas", "momentum"} if state.scheduler is not None else set())
        groups = zip(values["optimizer"]["groups"], ensure_optimizer(state).param_groups, strict=True)
        found += [f"{key}={saved[key]} (script: {present[key]})" for saved, present in groups
                  for key in saved if key in present and key not in moved and saved[key] != present[key]]
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
        warnings.warn(f"The checkpoint was saved by {values['world_size']} processes and is resumed by {world_size}: their random "
                      "states do not fit, so dropout draws other numbers than the uninterrupted run.", stacklevel=2)
        return None
    return read_json(_existing(source / _random_file(session.current().launcher.topology().rank)))


def _random_file(rank: int) -> str:
    return f"rng_rank{rank}.json"


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise CheckpointError(f"`{path}` is missing: the checkpoint is incomplete and cannot be resumed. Use another one, or take "
                              "the weights only: `load`.")
    return path
