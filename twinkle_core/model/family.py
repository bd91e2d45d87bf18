"""What is particular to a family of models, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from twinkle_core import registry


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """Registered under the Hugging Face `model_type`.

    Attributes:
        template: name of the chat template that fits.
        block_classes: names of the classes of its layers, for sharding and activation checkpointing.
        tensor_plan: parameter pattern -> style, where transformers has none.
        has_recurrent_layers: whether state runs from token to token, so that rows cannot be packed.
    """

    template: str
    block_classes: tuple[str, ...] = ()
    tensor_plan: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
    has_recurrent_layers: bool = False


def family_of(module: Any) -> ModelFamily | None:
    """Return the registered family of a module, by its own `model_type` or its text model's; None if there is none."""
    families = registry.names("model_families")
    for model_type in (module.config.model_type, module.config.get_text_config().model_type):
        if model_type in families:
            return registry.resolve("model_families", model_type)
    return None


def block_classes(module: Any) -> list[str]:
    """Return the class names of a module's layers: what its family says, else what transformers says must not be split."""
    family = family_of(module)
    return list(family.block_classes if family is not None and family.block_classes else module._no_split_modules or ())
