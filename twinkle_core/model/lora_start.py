"""The weights that a LoRA begins with.

Each parameter is drawn on the CPU from a generator of its own, seeded by the session's seed and the parameter's name: so it is the
same on one device and on whichever rank holds it or a part of it, and does not depend on what was drawn before. The adapter's own
name is not part of it. Distributions are peft's.
"""

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import fields

import torch
from peft import LoraConfig

from twinkle_core import session
from twinkle_core.errors import ModelError

_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
_FREE = {"init_lora_weights", "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "target_parameters",
         "task_type", "peft_type", "bias", "lora_bias", "use_rslora", "fan_in_fan_out", "modules_to_save", "layers_to_transform",
         "layers_pattern", "rank_pattern", "alpha_pattern", "inference_mode", "base_model_name_or_path", "revision", "peft_version",
         "auto_mapping", "runtime_config"}
"""Fields of a configuration whatever whose value an adapter can be added to a model without its weights being there."""


def needs_weights(config: LoraConfig) -> str:
    """Return the field of a configuration that computes with the model's weights when the adapter is added, or ""."""
    return _other_field(config) if is_drawn(config) else f"init_lora_weights={config.init_lora_weights!r}"


def check_for_axes(config: LoraConfig, axes: Collection[str]) -> None:
    """Raise `ModelError` for an adapter that needs whole matrices in every pass, on a mesh that cuts them."""
    if "tp" in axes and (field := _other_field(config)):
        raise ModelError(f"`{field}` of an adapter computes with whole weights in every pass, and `tp` cuts them. Leave it out, or "
                         "use a mesh without `tp`.")


def _other_field(config: LoraConfig) -> str:
    """Return the first field that is set and is more than a plain LoRA has, or ""."""
    default = LoraConfig()
    other = [field.name for field in fields(LoraConfig)
             if field.name not in _FREE and getattr(config, field.name) != getattr(default, field.name)]
    return f"{other[0]}={getattr(config, other[0])!r}" if other else ""


def is_drawn(config: LoraConfig) -> bool:
    """Return whether the first weights are drawn, rather than computed."""
    return config.init_lora_weights in (True, False, "gaussian")


def adapter_place(name: str) -> tuple[str, str] | None:
    """Return (layer, adapter) of a parameter that is one of LoRA's own matrices, else None."""
    parts = name.split(".")
    place = next((index for index, part in enumerate(parts) if part in _PARTS), None)
    return None if place is None else (".".join(parts[:place]), parts[place + 1])


def start_value(name: str, shape: Sequence[int], config: LoraConfig, *, r: int) -> torch.Tensor:
    """Return the first value of the adapter parameter `name`, whole, in fp32.

    Args:
        name: in the module, e.g. `model.layers.0.mlp.up_proj.lora_A.default.weight`.
        shape: of the whole parameter.
        config: of the adapter, for which `is_drawn`.
        r: rank of this layer.
    """
    parts = name.split(".")
    place = next(index for index, part in enumerate(parts) if part in _PARTS)
    value = torch.zeros(tuple(shape))
    del parts[place + 1]
    digest = hashlib.blake2b(f"{session.current().seed}:{'.'.join(parts)}".encode())
    generator = torch.Generator().manual_seed(int.from_bytes(digest.digest()[:7], "big"))
    kind, is_bias = parts[place], parts[-1] == "bias"
    if config.init_lora_weights is False:
        if kind.startswith("lora_embedding"):
            return value.normal_(generator=generator)
        bound = 1 / math.sqrt(r if is_bias else math.prod(value.shape[1:]))
        return value.uniform_(-bound, bound, generator=generator)
    if kind == "lora_embedding_B":
        return value.normal_(generator=generator)
    if kind != "lora_A" or is_bias:
        return value
    if config.init_lora_weights == "gaussian":
        return value.normal_(std=1 / r, generator=generator)
    bound = 1 / math.sqrt(math.prod(value.shape[1:]))  # Kaiming, with the slope sqrt(5) of torch's linear layers
    return value.uniform_(-bound, bound, generator=generator)
