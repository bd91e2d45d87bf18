"""The weights of a module under their own names, with or without an adapter merged into them. The live module stays as it is.

peft renames what it wraps: `q_proj.weight` becomes `q_proj.base_layer.weight`, a fully trained `lm_head` becomes
`lm_head.modules_to_save.<adapter>`. The names here are those that the module had before.
"""

from collections.abc import Iterator

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

from twinkle_core.errors import ModelError


def plain_weights(module: torch.nn.Module, *, merge: str | None = None) -> dict[str, torch.Tensor]:
    """Return name -> tensor of the module without its adapters, or with the adapter `merge` merged into it.

    Tensors that are not changed by merging share memory with the module; tied names hold one and the same tensor object. A merged
    weight keeps the dtype that the module has: the sum is computed in the wider of the two dtypes and rounded once.
    """
    replaced = {} if merge is None else _merged(module, merge)
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        plain = plain_name(name, merge, module)
        if plain is not None and tensor is not None:
            merged = replaced.get(plain)
            weights[plain] = tensor if merged is None else merged
    return weights


def tied_names(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return name -> the earlier name that holds the same tensor."""
    first: dict[int, str] = {}
    return {name: first[id(tensor)] for name, tensor in weights.items() if first.setdefault(id(tensor), name) != name}


def name_in_files(name: str) -> str:
    """Return the name that a parameter of the model itself, or a copy of it that an adapter trains, had before peft wrapped it."""
    parts = _without_wrappers(name)
    for part, count in (("original_module", 1), ("modules_to_save", 2)):
        if part in parts:
            place = parts.index(part)
            del parts[place:place + count]
    return ".".join(parts)


def _merged(module: torch.nn.Module, adapter: str) -> dict[str, torch.Tensor]:
    """Return plain name -> merged tensor of each weight that the adapter changes."""
    merged: dict[str, torch.Tensor] = {}
    for name, layer in _layers_with(module, adapter):
        merged.update({".".join([*_without_wrappers(name), key]): tensor for key, tensor in merged_layer(layer, adapter).items()})
    return merged


@torch.no_grad()
def merged_layer(layer: BaseTunerLayer, adapter: str) -> dict[str, torch.Tensor]:
    """Return name in the layer ("weight", "bias") -> merged tensor of what the adapter changes in it."""
    own = dict(layer.get_base_layer().named_parameters(recurse=False))
    storage = {key: parameter.data for key, parameter in own.items()}
    before = {key: data.clone() for key, data in storage.items()}
    try:
        layer.merge(adapter_names=[adapter])
        return {key: parameter.data.clone() for key, parameter in own.items() if not torch.equal(parameter.data, before[key])}
    finally:
        for key, parameter in own.items():
            parameter.data = storage[key].copy_(before[key])
        layer.merged_adapters.clear()


def _layers_with(module: torch.nn.Module, adapter: str) -> Iterator[tuple[str, BaseTunerLayer]]:
    for name, layer in module.named_modules():
        if isinstance(layer, AuxiliaryTrainingWrapper) and not isinstance(layer, ModulesToSaveWrapper):
            raise ModelError(f"`{name}` trains single tokens (`trainable_token_indices`), which cannot be merged. Save the adapter "
                             "without `merge=True`.")
        if isinstance(layer, BaseTunerLayer) and any(adapter in getattr(layer, kind) for kind in layer.adapter_layer_names):
            yield name, layer


def _without_wrappers(name: str) -> list[str]:
    return [part for part in name.split(".") if part != "base_layer"]


def plain_name(name: str, merge: str | None, module: torch.nn.Module) -> str | None:
    """Return the name without peft's wrappers, or None for what belongs to an adapter or is replaced by one."""
    parts = _without_wrappers(name)
    if any(part.startswith("lora_") for part in parts):
        return None
    for index, part in enumerate(parts):
        if part not in ("original_module", "modules_to_save"):
            continue
        wrapper = module.get_submodule(".".join(name.split(".")[:name.split(".").index(part)]))
        if not isinstance(wrapper, ModulesToSaveWrapper):
            continue
        used = merge if merge is not None and merge in wrapper.modules_to_save else None
        if part == "original_module":
            return None if used else ".".join(parts[:index] + parts[index + 1:])
        return ".".join(parts[:index] + parts[index + 2:]) if parts[index + 1] == used else None
    return ".".join(parts)
