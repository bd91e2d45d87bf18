"""The states of one model: which of them a call means, and what a new adapter begins with."""

import copy
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from twinkle_core.errors import ArgumentError, ArgumentTypeError, ModelError, check_count, did_you_mean, listing
from twinkle_core.model.adapter import AdapterState, ForwardPass
from twinkle_core.model.lora import check_adapter_name
from twinkle_core.model.lora_start import check_for_axes

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig

    from twinkle_core.model.precision import LossScaler
    from twinkle_core.parallel.placed import Placed


def chosen_state(adapter_name: str, adapters: Mapping[str, AdapterState], whole: AdapterState) -> AdapterState:
    """Return the state that `adapter_name` means: the adapter's, the only adapter's, or the whole model's if it has none.

    Raises: `ModelError` that lists the adapters if none is meant, or `ArgumentError` if there is none of that name.
    """
    if not isinstance(adapter_name, str):
        raise ArgumentTypeError(f"`adapter_name={adapter_name!r}` is of type {type(adapter_name).__name__}. Pass a string.")
    if adapter_name in adapters:
        return adapters[adapter_name]
    if adapter_name:
        raise ArgumentError(f"`adapter_name={adapter_name!r}`: this model has no such adapter."
                            f"{did_you_mean(adapter_name, adapters)} Adapters: {listing(adapters)}. Add one with "
                            "`add_adapter_to_model(name, config)`.")
    if len(adapters) > 1:
        raise ModelError(f"This model has several adapters: {listing(adapters)}. Say which one with `adapter_name=`.")
    return next(iter(adapters.values()), whole)


def check_new(adapter_name: object, adapters: Mapping[str, AdapterState], gradient_accumulation_steps: object) -> None:
    """Raise `ArgumentError` unless an adapter of this name and accumulation can be added."""
    check_adapter_name(adapter_name)
    if adapter_name in adapters:
        raise ArgumentError(f"This model has an adapter `{adapter_name}` already. Adapters: {listing(adapters)}. Choose "
                            "another name.")
    check_count("gradient_accumulation_steps", gradient_accumulation_steps, least=1)


def check_placed(config: "LoraConfig", placed: "Placed | None", axes: Collection[str], adapters: Collection[str]) -> None:
    """Raise `ModelError` if a mesh does not take such an adapter, or a model lies on ranks in a way that takes no more."""
    check_for_axes(config, axes)
    if placed is None or not axes:
        return
    if not adapters:
        raise ModelError("This model was used as a whole on its mesh already. Call `add_adapter_to_model` before the first "
                         "forward pass.")
    if cutting := [axis for axis in ("tp", "pp") if axis in axes]:
        raise ModelError(f"This model lies on its mesh already, where `{cutting[0]}` has cut its layers. Add all adapters before "
                         "the first forward pass, or use a mesh without `tp` and `pp`.")


def check_trained(whole: AdapterState, adapter_name: str, model_id: str, say_once: Callable[[str], None]) -> None:
    """Raise `ModelError` if the optimizer of the whole model has nothing to do any more; say it if its work was not saved."""
    if not whole.step:
        raise ModelError("An optimizer was set for the whole model, which a LoRA freezes. Call `set_optimizer` after "
                         "`add_adapter_to_model`.")
    if whole.saved_step != whole.step:
        say_once(f"The whole model has taken {whole.step} steps, and these weights were not saved: the adapter `{adapter_name}` "
                 f"alone will not fit `{model_id}`. Call `save` before `add_adapter_to_model`, or `save(merge=True)` after.")


def begun_like(
    whole: AdapterState, name: str, parameters: "dict[str, torch.nn.Parameter]", *, gradient_accumulation_steps: int,
    scaler: "LossScaler | None", placed: "Placed | None",
) -> AdapterState:
    """Return the state of a new adapter, with the loss, template, processor and metrics that were said for the whole model."""
    return AdapterState(
        name=name, parameters=parameters, is_lora=True, gradient_accumulation_steps=gradient_accumulation_steps,
        processor=copy.copy(whole.processor), loss=whole.loss, template=whole.template, metrics=copy.deepcopy(whole.metrics),
        eval_metrics=copy.deepcopy(whole.eval_metrics), scaler=scaler,
        placed=placed)


def pending_of(state: AdapterState, method: str) -> ForwardPass:
    """Return the last `forward`, without which `method` cannot be called."""
    if state.pending is None:
        raise ModelError(f"`{method}()` needs a `forward(...)` before it. Call `forward`, or use `forward_backward`.")
    return state.pending


def trainable(module: "torch.nn.Module") -> "dict[str, torch.nn.Parameter]":
    """Return name -> parameter of all that is trained."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
