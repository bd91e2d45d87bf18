"""LoRA adapters inside a module, through peft: several by name, one active at a time.

The layers are put into the module itself; there is no `PeftModel` around it, which would cost a wrapper's time in every forward
pass. What is trained with which optimizer is left to the adapters' states.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, LoraModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper

from twinkle_core.errors import ArgumentError, ArgumentTypeError, ModelError, TwinkleError, check_keywords
from twinkle_core.model.loading import seeded

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
    return dataclasses.replace(config) if dataclasses.is_dataclass(config) else config


class LoraAdapters:
    """The adapters of one module.

    Attributes:
        configs: adapter name -> its `LoraConfig`, in the order they were added.
    """

    def __init__(self, module: torch.nn.Module, *, device: str) -> None:
        self._module, self._device = module, device
        self._tuner: LoraModel | None = None
        self._active: str | None = None
        self.configs: dict[str, PeftConfig] = {}

    def add(self, name: str, config: LoraConfig) -> dict[str, torch.nn.Parameter]:
        """Put an adapter into the module, freeze the rest, and return its parameters.

        Its first weights depend on the session's seed only, not on what was drawn before.

        Raises: `ModelError` if no layer matches, with the names of layers there are.
        """
        config.inference_mode = False
        try:
            with seeded(self._device):
                if self._tuner is None:
                    self._tuner = LoraModel(self._module, config, name)
                else:
                    self._tuner.peft_config[name] = config
                    self._tuner.inject_adapter(self._module, name)
        except (ValueError, RuntimeError, TypeError) as error:
            if isinstance(error, TwinkleError):
                raise
            if self._tuner is not None:
                self._tuner.peft_config.pop(name, None)
            raise ModelError(f"The LoRA `{name}` cannot be added: {_first_line(error)} The linear layers of this model are called "
                             f"{self._layer_names()}.") from error
        self.configs[name] = config
        for layer in self._layers():
            layer.cast_input_dtype_enabled = False  # pyright: ignore - autocast does it where dtypes differ; peft would go through fp32 first
        self._active = None
        self.activate(name)
        parameters = self.parameters(name)
        for parameter in parameters.values():
            if parameter.dtype in (torch.bfloat16, torch.float16):  # as the layers around it; too coarse to take small steps
                parameter.data = parameter.data.float()
        return parameters

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
        """Run the base model inside the block."""
        if self._tuner is None:
            yield
            return
        self._tuner.disable_adapter_layers()
        try:
            yield
        finally:
            self._tuner.enable_adapter_layers()
            self._active = None

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
        names = {key.rpartition(".")[2] for key, module in self._module.named_modules() if isinstance(module, torch.nn.Linear)}
        return ", ".join(f"`{name}`" for name in sorted(names - {"base_layer", *self.configs}))


def _parameters_of(container: Any, name: str) -> set[int]:
    if not isinstance(container, torch.nn.ModuleDict | torch.nn.ParameterDict) or name not in container:
        return set()
    value = container[name]
    return {id(value)} if isinstance(value, torch.nn.Parameter) else {id(parameter) for parameter in value.parameters()}


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
