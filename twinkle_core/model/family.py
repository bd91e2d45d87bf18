"""What is particular to a family of models, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
