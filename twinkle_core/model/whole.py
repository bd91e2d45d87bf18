"""A model that is spread over ranks, as one device would hold it: what checkpoints are made of.

`outline` is the whole model and its optimizer without memory, under the same names and in the same classes. A checkpoint is laid
out by it, before the tensors are written one after the other (`streaming`), and held against it, before each rank takes its own
part out of the files (`taking`): so saving needs to know nothing about meshes, a checkpoint is the same on every mesh, and any mesh
can go on from it. `gather` is for what needs all weights at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, overload

import torch
from peft import LoraModel

from twinkle_core.errors import ModelError
from twinkle_core.model import identity
from twinkle_core.model.adapter import AdapterState
from twinkle_core.model.merging import plain_weights
from twinkle_core.parallel.gathering import whole_tensor
from twinkle_core.parallel.pipeline import is_tied
from twinkle_core.parallel.placed import Placed

_SEPARATOR = "::"

if TYPE_CHECKING:
    from twinkle_core.model.transformers_model import TransformersModel


@dataclass
class WholeModel:
    """Stands in for a `TransformersModel` in `saving`: all of it on the CPU, or an outline.

    Attributes:
        model_id: of the model.
        module: the Hugging Face module with whole weights.
        lora: of the model; its `configs` are used.
        precision: of the model.
        chosen: the state that is saved or loaded, with whole parameters and optimizer.
        base_samples: of an outline with an adapter, a sample of the weights, which it has not itself.
    """

    model_id: str
    module: Any
    lora: Any
    precision: Any
    chosen: AdapterState = field(repr=False)
    base_samples: dict[str, float] | None = None

    def ready(self, adapter_name: str) -> AdapterState:
        """Return the state; it was chosen when the model was gathered."""
        return self.chosen


@overload
def gather(model: "TransformersModel", state: AdapterState) -> WholeModel: ...
@overload
def gather(model: "TransformersModel", state: AdapterState, *, keep: bool) -> WholeModel | None: ...
def gather(model: "TransformersModel", state: AdapterState, *, keep: bool = True) -> WholeModel | None:
    """Collect a model's weights on every rank that says `keep`; every rank must call it. The others get None."""
    placed = placed_of(state)
    weights = _gather_weights(model.module, placed, keep=keep)
    if not keep:
        return None
    module = _empty_module(model)
    module.load_state_dict(weights, assign=True, strict=True)
    _tie(module, weights)
    if placed.stages and is_tied(module):  # first and last stage each had it
        module.get_output_embeddings().weight = module.get_input_embeddings().weight
    chosen = replace(state, parameters={}, placed=None, optimizer=None)
    return WholeModel(model.model_id, module, model.lora, model.precision, chosen)


def outline(model: "TransformersModel", state: AdapterState, *, with_optimizer: bool = False) -> WholeModel:
    """Return the whole model and one of its states without memory, the same on every rank; every rank must call it.

    `with_optimizer`: with what the optimizer has of each parameter; else it is as new.
    """
    placed = placed_of(state)
    module = _empty_module(model)
    _untie(module, model.module, placed)
    _settle_dtypes(module, model.module, placed)
    groups = _gather_groups(state, placed)
    trained = {name: parameter for name, parameter in module.named_parameters() if name in groups}
    optimizer = _whole_optimizer(state, trained, groups, _outlined_moments(state, trained, placed) if with_optimizer else {})
    chosen = replace(state, parameters=trained, placed=None, optimizer=optimizer)
    samples = _gather_samples(model.module, module, placed) if state.is_lora else None
    return WholeModel(model.model_id, module, model.lora, model.precision, chosen, samples)


def placed_of(state: AdapterState) -> Placed:
    """Return the ranks that a state lives on."""
    if state.placed is None:
        raise ModelError("This model is on no ranks yet.")
    return state.placed


def _untie(module: Any, live: Any, placed: Placed) -> None:
    """Give an output layer of its own to a module whose configuration says that it is tied, though its files said otherwise."""
    head = live.get_output_embeddings()
    if not placed.stages and is_tied(live) and head.weight is not live.get_input_embeddings().weight:
        own = module.get_output_embeddings()
        own.weight = torch.nn.Parameter(torch.empty_like(own.weight), own.weight.requires_grad)


def _settle_dtypes(module: Any, live: Any, placed: Placed) -> None:
    """Give the tensors of a hollow module the dtypes that the live ones have."""
    own = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in live.state_dict().items()}
    dtypes = placed.ranks.union_of_stages(own, keep=True)
    for name, tensor in module.state_dict(keep_vars=True).items():
        tensor.data = tensor.data.to(getattr(torch, dtypes[name]))


def _outlined_moments(
    state: AdapterState, parameters: Mapping[str, torch.nn.Parameter], placed: Placed,
) -> dict[str, dict[str, Any]]:
    """Return parameter name -> its optimizer state; what has its parameter's shape is hollow."""
    own: dict[str, Any] = {}
    for name, parameter in state.parameters.items():
        for key, value in (state.optimizer.state.get(parameter, {}) if state.optimizer else {}).items():
            is_cut = isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == parameter.shape
            own[f"{name}{_SEPARATOR}{key}"] = _Cut(value.dtype) if is_cut else value
    moments: dict[str, dict[str, Any]] = {}
    for joined, value in placed.ranks.union_of_stages(own, keep=True).items():
        name, _, key = joined.rpartition(_SEPARATOR)
        hollow = torch.empty_like(parameters[name], dtype=value.dtype, device="meta") if isinstance(value, _Cut) else value
        moments.setdefault(name, {})[key] = hollow
    return moments


@dataclass(frozen=True)
class _Cut:
    """Stands for a tensor that is cut as its parameter is."""

    dtype: torch.dtype


def _gather_samples(live: Any, module: Any, placed: Placed) -> dict[str, float]:
    """Return the samples of the model's weights that a checkpoint keeps, gathering one weight at a time."""
    plain = plain_weights(module)
    names = {id(tensor): name for name, tensor in module.state_dict(keep_vars=True).items()}
    held = live.state_dict(keep_vars=True)
    own: dict[str, float] = {}
    for sampled in identity.sampled_names(plain):
        name = names[id(plain[sampled])]
        if name in held:
            own |= identity.sample_weights({sampled: whole_tensor(placed, name, held[name].detach())})
    return placed.ranks.union_of_stages(own, keep=True)


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
