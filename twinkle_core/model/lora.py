"""LoRA adapters inside a module, through peft: several by name, one active at a time.

The layers are put into the module itself; there is no `PeftModel` around it, which would cost a wrapper's time in every forward
pass. What is trained with which optimizer is left to the adapters' states.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, LoraModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper

from twinkle_core.errors import (
    ArgumentError,
    ArgumentTypeError,
    ModelError,
    TwinkleError,
    check_finite,
    check_keywords,
    first_line,
    listing,
)
from twinkle_core.model.hollow import is_hollow
from twinkle_core.model.loading import seeded
from twinkle_core.model.lora_start import adapter_place, is_drawn, start_value
from twinkle_core.model.undo import undone_on_error
from twinkle_core.warning import warn

if TYPE_CHECKING:
    from peft import PeftConfig


def lora_config(config: Any) -> LoraConfig:
    """Return a `LoraConfig` of what a user passed: one, or a dict of its fields. Raises: `ArgumentTypeError`, `ArgumentError`."""
    if isinstance(config, Mapping):
        names = [field.name for field in dataclasses.fields(LoraConfig) if field.init]
        check_keywords("LoraConfig", config, names)
        try:
            config = LoraConfig(**{"task_type": "CAUSAL_LM", **config})
        except (ValueError, TypeError) as error:
            raise ArgumentError(f"peft refuses this LoRA configuration: {error} Change the value, or leave it out.") from error
    if not isinstance(config, LoraConfig):
        raise ArgumentTypeError(f"The adapter's config is of type `{type(config).__name__}`. Pass a peft `LoraConfig`, or a dict "
                                "of its fields such as {\"r\": 8, \"lora_alpha\": 16, \"target_modules\": \"all-linear\"}.")
    for name in ("lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern"):
        check_finite(f"LoraConfig.{name}", getattr(config, name))
    return dataclasses.replace(config) if dataclasses.is_dataclass(config) else config


def check_adapter_name(name: object) -> None:
    """Raise `ArgumentError` unless `name` can be part of the names of a module's parameters."""
    if not isinstance(name, str) or not name or not name.replace("-", "_").isidentifier():
        raise ArgumentError(f"`adapter_name={name!r}`: use letters, digits, `_` and `-`, beginning with a letter.")
    if hasattr(torch.nn.ModuleDict(), name) or hasattr(torch.nn.ParameterDict(), name):
        raise ArgumentError(f"`adapter_name={name!r}` is the name of an attribute that every torch module has. Use another one, "
                            f"such as `{name}_1`.")


class LoraAdapters:
    """The adapters of one module.

    Attributes:
        configs: adapter name -> its `LoraConfig`, in the order they were added.
        base_steps: optimizer steps that the base model had taken when the first was added.
    """

    def __init__(self, module: torch.nn.Module, *, device: str) -> None:
        self._module, self._device = module, device
        self._tuner: LoraModel | None = None
        self._active: str | None = None
        self.configs: dict[str, PeftConfig] = {}
        self.base_steps = 0

    def add(self, name: str, config: LoraConfig) -> dict[str, torch.nn.Parameter]:
        """Put an adapter into the module, freeze the rest, and return its parameters.

        Its first weights depend on the session's seed only, not on what was drawn before.

        Raises: `ModelError` for what peft refuses, with the names of layers there are; the module is then as it was.
        """
        config.inference_mode = False
        root = self._module if self._tuner is None else self._tuner
        with self._refused(name), undone_on_error(root), seeded(self._device):
            self._check_targets(config)
            if self._tuner is None:
                tuner = LoraModel(self._module, config, name)
            else:
                tuner = self._tuner
                tuner.peft_config[name] = config
                tuner.inject_adapter(self._module, name)
        self._tuner = tuner
        self.configs[name] = config
        for layer in self._layers():
            layer.cast_input_dtype_enabled = False  # pyright: ignore - autocast does it where dtypes differ; peft would go through fp32 first
        self._active = None
        self.activate(name)
        parameters = self.parameters(name)
        for key, parameter in parameters.items():
            if parameter.dtype in (torch.bfloat16, torch.float16):  # as the layers around it; too coarse to take small steps
                parameter.data = parameter.data.float()
            value = None if is_hollow(parameter) else self.start_value(key, parameter.shape)
            if value is not None:
                parameter.data.copy_(value)
        return parameters

    def start_value(self, parameter_name: str, shape: Sequence[int]) -> torch.Tensor | None:
        """Return what an adapter's parameter of this whole shape begins with; None if that is not drawn, but left by peft."""
        found = adapter_place(parameter_name)
        if found is None:
            return None
        layer, adapter = found
        config, ranks = self.configs.get(adapter), getattr(self._module.get_submodule(layer), "r", {})
        if not isinstance(config, LoraConfig) or not is_drawn(config) or adapter not in ranks:
            return None
        return start_value(parameter_name, shape, config, r=ranks[adapter])

    def parameters(self, name: str) -> dict[str, torch.nn.Parameter]:
        """Return name in the module -> parameter, of exactly this adapter."""
        owned = self._owned(name)
        return {key: parameter for key, parameter in self._module.named_parameters() if id(parameter) in owned}

    def activate(self, name: str) -> None:
        """Let the forward pass go through this adapter, and no other."""
        if self._active != name and self._tuner is not None:
            self._tuner.set_adapter(name)
            self._active = name

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Run the base model inside the block. Raises: `ModelError` if there is no adapter, so that the model is its own base."""
        if self._tuner is None:
            raise ModelError("`disable_lora=True`: this model has no adapter, and trained as a whole it is not its own reference "
                             "any more. Load a second `TransformersModel` as the reference, or train a LoRA "
                             "(`add_adapter_to_model`).")
        self._tuner.disable_adapter_layers()
        try:
            yield
        finally:
            self._tuner.enable_adapter_layers()
            self._active = None

    @contextlib.contextmanager
    def _refused(self, name: str) -> Iterator[None]:
        """Translate what peft raises of a configuration."""
        try:
            yield
        except TwinkleError:
            raise
        except Exception as error:
            raise ModelError(f"The LoRA `{name}` cannot be added: {first_line(error)} The linear layers of this model are called "
                             f"{self._layer_names()}.") from error

    def _check_targets(self, config: LoraConfig) -> None:
        """Hold the names in a configuration against the module: peft takes those that match nothing without a word.

        Raises: `ModelError` for layers to train that are not there. Warns of LoRA targets that are not, if others are.
        """
        paths = [path for path, _ in self._module.named_modules()]
        missing = [name for name in config.modules_to_save or () if not any(path.endswith(name) for path in paths)]
        if missing:
            raise ModelError(f"`modules_to_save` names {listing(missing)}, but no module of this model is called so. The "
                             f"linear layers are called {self._layer_names()}.")
        if not isinstance(config.target_modules, str):
            parts = [path.replace(".base_layer", "") for path in paths]
            absent = [name for name in config.target_modules or () if not any(f".{part}".endswith(f".{name}") for part in parts)]
            if absent and len(absent) < len(config.target_modules or ()):
                warn(f"`target_modules` names {listing(absent)}, but no layer of this model is called so. The linear "
                              f"layers are called {self._layer_names()}.")

    def _owned(self, name: str) -> set[int]:
        found: set[int] = set()
        for layer in self._layers():
            for attribute in layer.adapter_layer_names:
                found |= _parameters_of(getattr(layer, attribute), name)
        for module in self._module.modules():
            if isinstance(module, AuxiliaryTrainingWrapper):
                for attribute in module.adapter_layer_names:
                    found |= _parameters_of(getattr(module, attribute), name)
        return found

    def _layers(self) -> Iterator[BaseTunerLayer]:
        return (module for module in self._module.modules() if isinstance(module, BaseTunerLayer))

    def _layer_names(self) -> str:
        names = {key.removesuffix(".base_layer").rpartition(".")[2]
                 for key, module in self._module.named_modules() if isinstance(module, torch.nn.Linear)}
        return listing(names - set(self.configs))


def _parameters_of(container: Any, name: str) -> set[int]:
    if not isinstance(container, torch.nn.ModuleDict | torch.nn.ParameterDict) or name not in container:
        return set()
    value = container[name]
    return {id(value)} if isinstance(value, torch.nn.Parameter) else {id(parameter) for parameter in value.parameters()}
