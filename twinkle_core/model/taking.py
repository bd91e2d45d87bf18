"""Out of a checkpoint, each rank takes the parts of weights and optimizer state that it holds, and no more.

What fits and what does not is decided before, on the outline of the whole model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from twinkle_core.errors import CheckpointError
from twinkle_core.model import layout
from twinkle_core.model.adapter import AdapterState
from twinkle_core.model.file_weights import TensorFiles
from twinkle_core.model.training import ensure_optimizer
from twinkle_core.model.training_state import COUNTERS, SEPARATOR, Load
from twinkle_core.model.whole import WholeModel, placed_of
from twinkle_core.parallel.gradients import local
from twinkle_core.parallel.placed import Placed, part_of

if TYPE_CHECKING:
    from twinkle_core.model.transformers_model import TransformersModel

def take_weights(folder: Path, outline: WholeModel, model: "TransformersModel", state: AdapterState) -> None:
    """Copy this rank's part of the weights in `folder` into the model, or into its adapter."""
    placed, held = placed_of(state), model.module.state_dict(keep_vars=True)
    state.discard_gradients()
    if state.is_lora:
        files = TensorFiles(layout.weight_files(folder))
        for key, name in layout.adapter_names(outline.module, state.name).items():
            if name in held:
                _take(files, key, name, held[name], placed)
        return
    weights = layout.model_weights(folder, outline.module)
    for name, tensor in held.items():
        if name not in weights:
            raise CheckpointError(f"`{folder}` has no weight for `{name}`, which was added to the model. Load the checkpoint "
                                  "before the model is changed.")
        _take(weights, name, name, tensor, placed)


def read_outline(parameters: Mapping[str, torch.Tensor]) -> Load:
    """Return a function that reads a file of training state: what has the shape of its parameter without memory, the rest whole."""
    def read(path: Path) -> dict[str, torch.Tensor]:
        files = TensorFiles([path])
        found: dict[str, torch.Tensor] = {}
        for key in files.names:
            name, separator, _ = key.rpartition(SEPARATOR)
            if not separator:
                raise CheckpointError(f"`{path}` holds gradients: the checkpoint was saved between two steps by one process, which "
                                      "several cannot go on from. Resume it with one process, or one that was saved after a step.")
            hollow, parameter = files.hollow(key), parameters.get(name)
            is_cut = parameter is not None and hollow.ndim > 0 and hollow.shape == parameter.shape
            found[key] = hollow if is_cut else files.whole(key).clone()
        return found

    return read


def take_optimizer(path: Path, chosen: AdapterState, state: AdapterState) -> None:
    """Copy this rank's part of the optimizer state, and the counters, into `state`. `chosen` has taken in what the files hold."""
    if chosen.optimizer is not None:
        optimizer, placed, files = ensure_optimizer(state), placed_of(state), TensorFiles([path])
        optimizer.state.clear()
        for name, parameter in state.parameters.items():
            entry: dict[str, Any] = {}
            for key, value in chosen.optimizer.state.get(chosen.parameters[name], {}).items():
                is_cut = isinstance(value, torch.Tensor) and value.device.type == "meta"
                entry[key] = value if not is_cut else _take(
                    files, f"{name}{SEPARATOR}{key}", name, torch.zeros_like(parameter), placed)
            if entry:
                optimizer.state[parameter] = entry
        for mine, theirs in zip(optimizer.param_groups, chosen.optimizer.param_groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})
    for counted in (*COUNTERS, "scaler", "saved_step"):
        setattr(state, counted, getattr(chosen, counted))


def _take(files: Any, key: str, name: str, into: torch.Tensor, placed: Placed) -> torch.Tensor:
    """Copy this rank's part of what is called `key` in the files into `into`, which is cut as the parameter `name` is."""
    start, _, _ = part_of(name, into, placed)
    with torch.no_grad():
        files.copy(key, start, local(into.detach()))
    return into
