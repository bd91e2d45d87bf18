"""A model that is spread over ranks, as one device would hold it: what checkpoints are made of.

`gather` collects parameters and optimizer state on the CPU of one rank, under the same names and in the same classes, so that
saving needs to know nothing about meshes; `scatter` gives every rank its part of a whole model that was loaded. So a checkpoint is
the same on every mesh, and any mesh can go on from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, overload

import torch
from peft import LoraModel

from twinkle_core.errors import ModelError
from twinkle_core.model.adapter import AdapterState
from twinkle_core.parallel.gathering import own_part, whole_tensor
from twinkle_core.parallel.pipeline import is_tied
from twinkle_core.parallel.placed import Placed

_SEPARATOR = "::"

if TYPE_CHECKING:
    from twinkle_core.model.transformers_model import TransformersModel


@dataclass
class WholeModel:
    """Stands in for a `TransformersModel` in `saving`: all of it on the CPU.

    Attributes:
        model_id: of the model.
        module: the Hugging Face module with whole weights.
        lora: of the model; its `configs` are used.
        precision: of the model.
        chosen: the state that is saved or loaded, with whole parameters and optimizer.
    """

    model_id: str
    module: Any
    lora: Any
    precision: Any
    chosen: AdapterState = field(repr=False)

    def ready(self, adapter_name: str) -> AdapterState:
        """Return the state; it was chosen when the model was gathered."""
        return self.chosen


@overload
def gather(model: "TransformersModel", state: AdapterState) -> WholeModel: ...
@overload
def gather(model: "TransformersModel", state: AdapterState, *, keep: bool) -> WholeModel | None: ...
def gather(model: "TransformersModel", state: AdapterState, *, keep: bool = True) -> WholeModel | None:
    """Collect a model and one of its states on every rank that says `keep`; every rank must call it. The others get None."""
    placed = _placed(state)
    weights = _gather_weights(model.module, placed, keep=keep)
    groups = _gather_groups(state, placed)
    moments = _gather_optimizer(state, placed, keep=keep)
    if not keep:
        return None
    module = _empty_module(model)
    module.load_state_dict(weights, assign=True, strict=True)
    _tie(module, weights)
    if placed.stages and is_tied(module):  # first and last stage each had it
        module.get_output_embeddings().weight = module.get_input_embeddings().weight
    trained = {name: parameter for name, parameter in module.named_parameters() if name in groups}
    chosen = replace(state, parameters=trained, placed=None, optimizer=_whole_optimizer(state, trained, groups, moments))
    return WholeModel(model.model_id, module, model.lora, model.precision, chosen)


def scatter(whole: WholeModel, model: "TransformersModel", state: AdapterState) -> None:
    """Give this rank its part of a whole model: weights, optimizer state and counters."""
    placed = _placed(state)
    source = whole.module.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in model.module.state_dict(keep_vars=True).items():
            own_part(placed, name, source[name].detach(), into=tensor)
    chosen = whole.chosen
    if chosen.optimizer is not None and state.optimizer is not None:
        _scatter_optimizer(chosen, state, placed)
    for name in ("step", "micro_steps", "grad_count", "is_lr_step_due", "grad_norm", "lr", "clip", "scaler"):
        setattr(state, name, getattr(chosen, name))


def _placed(state: AdapterState) -> Placed:
    if state.placed is None:
        raise ModelError("This model is on no ranks yet.")
    return state.placed


def _gather_weights(module: Any, placed: Placed, *, keep: bool) -> dict[str, torch.Tensor]:
    gathered: dict[int, torch.Tensor] = {}
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in gathered:
            whole = whole_tensor(placed, name, tensor.detach())
            gathered[id(tensor)] = whole.to("cpu", copy=True) if keep or placed.stages else whole.new_empty(0)
        weights[name] = gathered[id(tensor)]
    return placed.ranks.union_of_stages(weights, keep=keep)


def _gather_groups(state: AdapterState, placed: Placed) -> dict[str, int]:
    """Return name -> number of the parameter group, of every trained parameter of all stages."""
    numbers = {id(parameter): number for number, group in enumerate(state.optimizer.param_groups if state.optimizer else ())
               for parameter in group["params"]}
    return placed.ranks.union_of_stages(
        {name: numbers.get(id(parameter), 0) for name, parameter in state.parameters.items()}, keep=True)


def _gather_optimizer(state: AdapterState, placed: Placed, *, keep: bool) -> dict[str, dict[str, Any]]:
    """Return parameter name -> its optimizer state."""
    flat: dict[str, Any] = {}
    for name, parameter in state.parameters.items():
        for key, value in (state.optimizer.state.get(parameter, {}) if state.optimizer else {}).items():
            is_cut = isinstance(value, torch.Tensor) and value.ndim > 0
            flat[f"{name}{_SEPARATOR}{key}"] = whole_tensor(placed, name, value).to("cpu", copy=True) if is_cut else value
    moments: dict[str, dict[str, Any]] = {}
    for joined, value in placed.ranks.union_of_stages(flat, keep=keep).items():
        name, _, key = joined.rpartition(_SEPARATOR)
        moments.setdefault(name, {})[key] = value
    return moments


def _empty_module(model: "TransformersModel") -> Any:
    """Return the module without memory, with the adapters in it, as the model was before it was put on its ranks."""
    with torch.device("meta"):
        module = type(model.module)(model.module.config)
        tuner: LoraModel | None = None
        for name, config in model.lora.configs.items():
            if tuner is None:
                tuner = LoraModel(module, config, name)
            else:
                tuner.peft_config[name] = config
                tuner.inject_adapter(module, name)
    module.name_or_path = model.module.name_or_path
    module.generation_config = model.module.generation_config
    if hasattr(model.module, "_weight_conversions"):  # how transformers maps names of its files to names of parameters
        module._weight_conversions = model.module._weight_conversions
    return module


def _tie(module: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Make parameters one where their tensors are."""
    first: dict[int, str] = {}
    for name, tensor in weights.items():
        earlier = first.setdefault(id(tensor), name)
        if earlier != name:
            parent, _, leaf = name.rpartition(".")
            module.get_submodule(parent).register_parameter(leaf, module.get_parameter(earlier))


def _whole_optimizer(
    state: AdapterState, parameters: Mapping[str, torch.nn.Parameter], numbers: Mapping[str, int],
    moments: Mapping[str, Mapping[str, Any]],
) -> torch.optim.Optimizer | None:
    if state.optimizer is None:
        return None
    groups = [{**group, "params": [parameter for name, parameter in parameters.items() if numbers[name] == number]}
              for number, group in enumerate(state.optimizer.param_groups)]
    try:
        optimizer = type(state.optimizer)(groups)  # type: ignore[call-arg]
    except TypeError as error:
        raise ModelError(f"`{type(state.optimizer).__name__}` cannot be made of its parameter groups alone ({error}), so its state "
                         "cannot be saved from several ranks. Use one that can, or save without `with_optimizer`.") from error
    for name, entry in moments.items():
        optimizer.state[parameters[name]] = dict(entry)
    return optimizer


def _scatter_optimizer(chosen: AdapterState, state: AdapterState, placed: Placed) -> None:
    source, target = chosen.optimizer, state.optimizer
    if source is None or target is None:
        return
    for name, parameter in state.parameters.items():
        entry: dict[str, Any] = {}
        for key, value in source.state.get(chosen.parameters[name], {}).items():
            is_like_it = isinstance(value, torch.Tensor) and value.shape == chosen.parameters[name].shape and value.ndim
            entry[key] = own_part(placed, name, value, into=torch.zeros_like(parameter)) if is_like_it else value
        if entry:
            target.state[parameter] = entry
    for mine, theirs in zip(target.param_groups, source.param_groups, strict=True):
        mine.update({key: value for key, value in theirs.items() if key != "params"})
