"""The files of a model and of an adapter: Hugging Face's layout for the one, peft's for the other.

Weights get the names and shapes of the checkpoint that the model was loaded from, and what that checkpoint holds beyond the model
(the vision tower of a vision-language model whose text is trained) is carried over, so that everything which reads the source
reads the result. What a checkpoint is for, and when it is written, is left to `saving`.
"""

import contextlib
import copy
import itertools
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft.utils import get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from twinkle_core.checkpoint.tensor_file import Stream, TensorFileWriter, write_tensors
from twinkle_core.errors import CheckpointError
from twinkle_core.model.file_weights import FileWeights, names_of_one
from twinkle_core.model.merging import name_in_files, tied_names

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
SHARD_BYTES = 5 * 10**9
_PEFT_PREFIX = "base_model.model."
_COPIED = ("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*", "*.model",
           "*.tiktoken", "*processor_config.json", "preprocessor_config.json", "generation_config.json", "*.py", "LICENSE*")
"""Files of a source checkpoint that are neither weights nor the config: tokenizer, template, processors, code, licence."""

_METADATA = {"format": "pt"}
Shapes = dict[str, tuple[int, ...]]


def file_weights(module: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return file name -> tensor of `weights`: tied ones once, names and shapes those of the checkpoint the module came from."""
    tied = tied_names(dict(weights))
    detached = {name: tensor.detach() for name, tensor in weights.items() if name not in tied}
    return revert_weight_conversion(module, detached)


def file_shapes(module: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> Shapes:
    """Return file name -> shape of what `file_weights` returns, without copying anything."""
    tied = tied_names(dict(weights))
    hollow = {name: tensor.detach().to("meta") for name, tensor in weights.items() if name not in tied}
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(module, hollow).items()}


def write_model(
    folder: Path, module: PreTrainedModel, weights: Mapping[str, torch.Tensor], *, source: Path | None,
    stream: Stream | None = None,
) -> None:
    """Write weights, config, tokenizer files and what the source checkpoint has beyond the model.

    Args:
        folder: to write into.
        module: whose config is written.
        weights: as `plain_weights` returns them.
        source: folder that the model was loaded from, if any.
        stream: (name, tensor) of the weights where `weights` are hollow.
    """
    tensors = file_weights(module, weights)
    dtype = max((tensor for tensor in tensors.values() if tensor.is_floating_point()), key=torch.Tensor.numel).dtype
    taken = revert_weight_conversion(module, {name: tensor.detach().to("meta") for name, tensor in weights.items()})
    tensors.update(_beyond(source, set(taken)))
    shards = _shards(tensors)
    files = {folder / file_name: {name: tensors[name] for name in names} for file_name, names in shards.items()}
    if stream is None:
        for path, held in files.items():
            write_tensors(path, held, metadata=_METADATA)
    else:
        _write_streamed(files, module, weights, stream)
    if len(shards) > 1:
        index = {"metadata": {"total_size": size_bytes(tensors)},
                 "weight_map": {name: file_name for file_name, names in shards.items() for name in names}}
        (folder / INDEX).write_text(json.dumps(index, indent=1), "utf-8")
    _copy_files(source, folder)
    is_untied = bool(getattr(module.config, "tie_word_embeddings", False)) and not tied_names(dict(weights))
    _write_config(folder, module, source, dtype=dtype, is_untied=is_untied)
    if not (folder / "generation_config.json").exists() and module.can_generate() and module.generation_config is not None:
        module.generation_config.save_pretrained(folder)


def adapter_weights(module: torch.nn.Module, name: str) -> dict[str, torch.Tensor]:
    """Return file name -> tensor of an adapter in peft's layout. The tensors share memory with the module."""
    state = get_peft_model_state_dict(module, adapter_name=name, save_embedding_layers=False)
    return {key if key.startswith(_PEFT_PREFIX) else _PEFT_PREFIX + key: tensor for key, tensor in state.items()}


def adapter_names(module: torch.nn.Module, name: str) -> dict[str, str]:
    """Return file name -> name in the module of the tensors of an adapter."""
    held = module.state_dict(keep_vars=True)
    names = {id(tensor): own for own, tensor in held.items()}
    state = get_peft_model_state_dict(module, state_dict=held, adapter_name=name, save_embedding_layers=False)
    return {key if key.startswith(_PEFT_PREFIX) else _PEFT_PREFIX + key: names[id(tensor)] for key, tensor in state.items()}


def adapter_file_name(name: str, adapter: str) -> str:
    """Return the name in peft's files of an adapter's parameter that is called `name` in the module."""
    is_copy = "modules_to_save" in name.split(".")  # of a layer of the model, which is called like it; LoRA's own keep their place
    plain = name_in_files(name) if is_copy else name.replace(f".{adapter}.", ".").removesuffix(f".{adapter}")
    return _PEFT_PREFIX + (plain.removesuffix(".weight") if "lora_magnitude_vector" in plain else plain)


def write_adapter(
    folder: Path, module: torch.nn.Module, name: str, config: Any, *, base: str, source: Path | None, stream: Stream | None = None,
) -> None:
    """Write an adapter's weights, its config and the tokenizer files. `base` names the model that it belongs to.

    `stream` gives (file name, tensor) where the module is hollow.
    """
    write_tensors(folder / ADAPTER_WEIGHTS, adapter_weights(module, name), stream=stream, metadata=_METADATA)
    saved = copy.copy(config)
    saved.base_model_name_or_path, saved.inference_mode = base, True
    saved.save_pretrained(folder)
    _copy_files(source, folder)


def size_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return how large the tensors are on disk."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model or adapter. Raises: `CheckpointError` if one is missing."""
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"`{folder / INDEX}` cannot be read: {error}. The checkpoint is damaged; use another.") from error
    else:
        names = [ADAPTER_WEIGHTS if (folder / ADAPTER_CONFIG).is_file() else WEIGHTS]
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"`{folder / name}` is missing: the checkpoint is incomplete, or `{folder}` is none. Pass what "
                                  "`save` returned, or a folder with weights as safetensors.")
    return [folder / name for name in names]


def read_shapes(folder: Path) -> Shapes:
    """Return name -> shape of the weights in a checkpoint, from the heads of its files."""
    shapes: Shapes = {}
    for path in weight_files(folder):
        with _opened(path) as file:
            shapes.update({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
    return shapes


def read_weights(folder: Path, *, leave_out: frozenset[str] = frozenset()) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the weights in a checkpoint, one at a time."""
    for path in weight_files(folder):
        with _opened(path) as file:
            for name in set(file.keys()) - leave_out:
                yield name, file.get_tensor(name)


def copy_weights(folder: Path, targets: Mapping[str, torch.Tensor]) -> None:
    """Copy the weights of a checkpoint into `targets` in place. What it holds beyond them is left out."""
    with torch.no_grad():
        for name, tensor in read_weights(folder):
            if name in targets:
                targets[name].copy_(tensor)


def load_model(folder: Path, module: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy the weights of a checkpoint into the module in place. `weights`: as `plain_weights` returns them."""
    source = model_weights(folder, module)
    for name, tensor in weights.items():
        source.copy(name, [0] * tensor.ndim, tensor)


def model_weights(folder: Path, module: PreTrainedModel) -> FileWeights:
    """Return the weights of a checkpoint by the names of a module's parameters, tied ones by all their names."""
    source = FileWeights(module, weight_files(folder), get_model_conversion_mapping(module))
    source.call_alike(names_of_one(module))
    return source


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"`{path}` cannot be read: {error}. The file is damaged; use another checkpoint.") from error


def _beyond(source: Path | None, taken: set[str]) -> dict[str, torch.Tensor]:
    """Return what a source checkpoint holds beyond the module's weights."""
    if source is None or not ((source / INDEX).is_file() or (source / WEIGHTS).is_file()):
        return {}
    return dict(read_weights(source, leave_out=frozenset(taken)))


def _shards(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Return file name -> names of the tensors in it, at most `SHARD_BYTES` a file unless one tensor is larger."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        size = size_bytes({name: tensor})
        if groups[-1] and filled + size > SHARD_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": names for number, names in enumerate(groups, start=1)}


def _write_streamed(
    files: Mapping[Path, Mapping[str, torch.Tensor]], module: PreTrainedModel, weights: Mapping[str, torch.Tensor], stream: Stream,
) -> None:
    """Write files whose tensors come by the names of the module's parameters, a layer at a time."""
    tied = tied_names(dict(weights))
    hollow = {name: tensor.detach() for name, tensor in weights.items() if name not in tied}
    by_layer = {name for layer in _layers(hollow.items()) for name in revert_weight_conversion(module, layer)}
    layers = _layers(stream) if by_layer == set(revert_weight_conversion(module, hollow)) else iter([dict(stream)])
    with contextlib.ExitStack() as stack:
        writers: dict[str, TensorFileWriter] = {}
        for path, held in files.items():
            writers.update(dict.fromkeys(held, stack.enter_context(TensorFileWriter(path, held, metadata=_METADATA))))
        for held in files.values():
            for name, tensor in held.items():
                if tensor.device.type != "meta":  # of the source beyond the model
                    writers[name].write(name, tensor)
        for layer in layers:
            for name, tensor in revert_weight_conversion(module, layer).items():
                writers[name].write(name, tensor)


def _layers(stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of each layer together, and others alone: conversions stay within a layer, as a rule."""
    def layer_of(item: tuple[str, torch.Tensor]) -> str:
        parts = item[0].split(".")
        number = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts))
        return ".".join(parts[:number + 1])

    for _, held in itertools.groupby(stream, layer_of):
        yield dict(held)


def _copy_files(source: Path | None, folder: Path) -> None:
    if source is None:
        return
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)


def _write_config(folder: Path, module: PreTrainedModel, source: Path | None, *, dtype: torch.dtype, is_untied: bool) -> None:
    """Write `config.json`: the source's where it describes more than the module, else the module's own."""
    values = json.loads((source / "config.json").read_text("utf-8")) if source and (source / "config.json").is_file() else {}
    if values.get("model_type") in (None, module.config.model_type):
        config = copy.deepcopy(module.config)
        config.architectures = [type(module).__name__]
        config.save_pretrained(folder)
        values = json.loads((folder / "config.json").read_text("utf-8"))
    parts = [values, *(values[key] for key in ("text_config",) if isinstance(values.get(key), dict))]
    for part in parts:
        part.pop("torch_dtype", None)
        part["dtype"] = str(dtype).removeprefix("torch.")
        if is_untied:
            part["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", "utf-8")
