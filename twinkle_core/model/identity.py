"""Whether a checkpoint belongs to a model: its type, its sizes, its adapter's configuration, the names and shapes of its weights.

Only files are read. What differs is named, the first three differences of many, so that a person sees at once which model or which
setting is the wrong one.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from twinkle_core.errors import CheckpointError
from twinkle_core.model.layout import ADAPTER_CONFIG, Shapes

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "head_dim", "num_experts", "num_local_experts", "moe_intermediate_size", "linear_num_key_heads", "linear_num_value_heads",
          "linear_key_head_dim", "linear_value_head_dim", "tie_word_embeddings")
_ADAPTER_FIELDS = ("peft_type", "r", "lora_alpha", "target_modules", "target_parameters", "layers_to_transform", "rank_pattern",
                   "alpha_pattern", "modules_to_save", "bias", "lora_bias", "use_rslora", "use_dora", "fan_in_fan_out")
_SHOWN = 3
_SAMPLES = 32


def describe_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return type and sizes of the text model that a config, as a dict, describes."""
    text = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else {}
    values = {**config, **(text or {})}
    return {"model_type": values.get("model_type"), **{name: values[name] for name in _SIZES if isinstance(values.get(name), int)}}


def read_model(folder: Path) -> dict[str, Any]:
    """Return what `config.json` in `folder` describes. Raises: `CheckpointError`."""
    return describe_model(_read_json(folder / "config.json"))


def describe_adapter(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a peft config that decide which weights there are and what they do."""
    return {name: _plain(config[name]) for name in _ADAPTER_FIELDS if name in config}


def read_adapter(folder: Path) -> dict[str, Any]:
    """Return what `adapter_config.json` in `folder` says. Raises: `CheckpointError`."""
    return describe_adapter(_read_json(folder / ADAPTER_CONFIG))


def sampled_names(weights: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the matrices of which a sample is taken, up to 32."""
    matrices = sorted(name for name, tensor in weights.items() if tensor.ndim > 1 and tensor.is_floating_point())
    return matrices[::max(1, len(matrices) // _SAMPLES)][:_SAMPLES]


def sample_weights(weights: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the middle element of up to 32 of the matrices, by name: what tells one model from another of the same sizes."""
    chosen = sampled_names(weights)
    if not chosen:
        return {}
    middle = [weights[name].detach().reshape(-1)[weights[name].numel() // 2].float() for name in chosen]
    return dict(zip(chosen, torch.stack(middle).tolist(), strict=True))


def differs(saved: Mapping[str, float], present: Mapping[str, float]) -> bool:
    """Return whether two samples are of different weights, and not of the same in another dtype."""
    return any(not math.isclose(value, present[name], rel_tol=2**-7, abs_tol=1e-6)  # bf16 has 8 bits
               for name, value in saved.items() if name in present)


def check_model(folder: Path, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if a checkpoint is of another model."""
    _check_values(folder, saved, present, what="is of another model", remedy="Build the model that it was saved from")


def check_adapter(folder: Path, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if an adapter was configured otherwise. Patterns of target modules are left to the weights' names."""
    known = {name: value for name, value in saved.items() if name != "target_modules" or isinstance(value, list)}
    _check_values(folder, known, present, what="holds an adapter of another configuration",
                  remedy="Call `add_adapter_to_model` with the configuration in its `adapter_config.json`")


def check_shapes(folder: Path, saved: Shapes, expected: Shapes, *, is_exact: bool) -> None:
    """Raise `CheckpointError` if weights are missing or of another shape; if `is_exact`, also if there are more."""
    wrong = [f"`{name}` is missing" for name in expected if name not in saved]
    wrong += [f"`{name}` has shape {saved[name]}, here {shape}"
              for name, shape in expected.items() if saved.get(name, shape) != shape]
    if is_exact:
        wrong += [f"`{name}` is unknown here" for name in saved if name not in expected]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError(f"The weights in `{folder}` do not fit this model: {'; '.join(wrong[:_SHOWN])}{more}. Build the "
                              "model and adapter that it was saved from, or use another checkpoint. Nothing was changed.")


def _check_values(folder: Path, saved: Mapping[str, Any], present: Mapping[str, Any], *, what: str, remedy: str) -> None:
    wrong = [f"{name} is {value!r} there, {present[name]!r} here" for name, value in saved.items()
             if name in present and present[name] != value]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError(f"`{folder}` {what}: {'; '.join(wrong[:_SHOWN])}{more}. {remedy}, or use another checkpoint. Nothing "
                              "was changed.")


def _plain(value: Any) -> Any:
    """Return a value of a config as JSON has it, sets sorted."""
    if isinstance(value, set | frozenset | list | tuple):
        return sorted(value, key=str)
    return str(value.value) if hasattr(value, "value") else value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"`{path}` cannot be read: {error}. The checkpoint is damaged; use another one.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"`{path}` holds a {type(values).__name__}, not a configuration. The checkpoint is damaged.")
    return values
