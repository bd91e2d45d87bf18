"""Checkpoints as plain models to sample from.

A LoRA becomes a copy of the model with the adapter merged in: generating through peft's layers costs a multiple of that on a
CPU. The copy shares the memory of every weight that the adapter does not change. Whatever does not fit the model is an error
that names it; nothing is ever sampled from the base model instead.
"""

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from twinkle_core.checkpoint.folder import is_checkpoint
from twinkle_core.checkpoint.manifest import verify
from twinkle_core.errors import ArgumentError, CheckpointError, HubError, ModelError, SamplerError, did_you_mean, listing
from twinkle_core.hub import resolve_model
from twinkle_core.model.identity import check_model, describe_model
from twinkle_core.model.loading import seeded

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

Fingerprint = tuple[tuple[str, int, int, int, int], ...]


@dataclass(frozen=True)
class _Loaded:
    model: torch.nn.Module
    fingerprint: Fingerprint


class AdapterModels:
    """The models that a sampler can sample from beside its base model.

    Named ones stay until they are replaced; of those that are only given by URI the last `keep` stay. A URI whose files have
    changed since is loaded again.
    """

    def __init__(self, base: Any, *, model_id: str, keep: int, load_model: Callable[[Path], torch.nn.Module]) -> None:
        self.base = base
        self.model_id = model_id
        self._keep = keep
        self._load_model = load_model
        self._by_name: dict[str, torch.nn.Module] = {}
        self._by_uri: OrderedDict[str, _Loaded] = OrderedDict()

    def add(self, name: str, uri: str) -> None:
        """Load the checkpoint at `uri` under `name`, in place of what was there. Raises: `SamplerError`."""
        if not name or not isinstance(name, str):
            raise ArgumentError(f"`adapter_name={name!r}`: give the adapter a name that `sample(adapter_name=)` can say.")
        self._by_name[name] = self._load(locate(uri), uri)

    def get(self, name: str, uri: str | None) -> torch.nn.Module:
        """Return the model of an adapter's name or of a checkpoint, or the base model. Raises: `SamplerError`."""
        if name and uri is not None:
            raise ArgumentError(f"`adapter_name={name!r}` and `adapter_uri={uri!r}` are both given. Pass one of them.")
        if name:
            if name not in self._by_name:
                raise SamplerError(f"The sampler has no adapter `{name}`.{did_you_mean(name, self._by_name)} It has: "
                                   f"{listing(self._by_name)}. Add it: `add_adapter_to_sampler({name!r}, adapter_uri)`.")
            return self._by_name[name]
        return self.base if uri is None else self._get_by_uri(uri)

    def clear(self) -> None:
        """Forget every copy: needed when the weights of the base model change, which the copies share in part."""
        self._by_name.clear()
        self._by_uri.clear()

    def _get_by_uri(self, uri: str) -> torch.nn.Module:
        folder = locate(uri)
        fingerprint = fingerprint_of(folder)
        loaded = self._by_uri.pop(uri, None)
        if loaded is None or loaded.fingerprint != fingerprint:
            loaded = None  # frees the old copy before the new one is made
            while len(self._by_uri) >= self._keep:
                self._by_uri.popitem(last=False)
            loaded = _Loaded(self._load(folder, uri), fingerprint)
        self._by_uri[uri] = loaded
        return loaded.model

    def _load(self, folder: Path, uri: str) -> torch.nn.Module:
        if is_checkpoint(folder):
            try:
                identity = verify(folder).identity.get("model", {})
                check_model(folder, identity, describe_model(self.base.config.to_dict()))
            except CheckpointError as error:
                raise SamplerError(f"The checkpoint `{uri}` cannot be used: {error}") from error
        if (folder / CONFIG).exists():
            return merge_adapter(self.base, folder, what=f"`{uri}` does not fit `{self.model_id}`")
        return self._load_full(folder, uri)

    def _load_full(self, folder: Path, uri: str) -> torch.nn.Module:
        if not (folder / "config.json").exists():
            names = listing(path.name for path in folder.iterdir())
            raise SamplerError(f"`{uri}` is not a checkpoint: {folder} has neither `{CONFIG}` (a LoRA) nor `config.json` (a "
                               f"model). It holds: {names}. Pass what `save` returned.")
        try:
            model = self._load_model(folder)
        except (ModelError, HubError) as error:
            raise SamplerError(f"The checkpoint `{uri}` cannot be loaded: {error}") from error
        expected = {name: tuple(tensor.shape) for name, tensor in self.base.state_dict().items()}
        given = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        _check_shapes(given, expected, what=f"`{uri}` is another model than `{self.model_id}`")
        return model


def locate(uri: str) -> Path:
    """Return the folder of a checkpoint: a path, or the URI of a hub. Raises: `SamplerError` if there is none."""
    if not isinstance(uri, str) or not uri:
        raise ArgumentError(f"`adapter_uri={uri!r}`: pass the string that `save` returned.")
    try:
        folder = resolve_model(uri) if "://" in uri else Path(uri).expanduser()
    except HubError as error:
        raise SamplerError(f"The adapter `{uri}` cannot be found: {error}") from error
    if not folder.is_dir():
        raise SamplerError(f"The adapter `{uri}` is not a folder (looked at {folder.absolute()}). Pass what `save` returned.")
    return folder


def fingerprint_of(folder: Path) -> Fingerprint:
    """Return what changes when a file of `folder` is written again, even with the same size and modification time."""
    stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.suffix in (".safetensors", ".json")]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for name, stat in stats)


def merge_adapter(base: torch.nn.Module, folder: Path, *, what: str) -> torch.nn.Module:
    """Return a copy of `base` with the LoRA in `folder` merged in; weights it does not change share memory with `base`.

    `what` begins the text of an error. Raises: `SamplerError` if a file cannot be read, or if names or shapes do not match.
    """
    from peft import LoraConfig, PeftConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    weights = _read_weights(folder / WEIGHTS)
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError) as error:
        raise SamplerError(f"{folder / CONFIG} cannot be read: {error}. Save the adapter again.") from error
    if not isinstance(config, LoraConfig):
        raise SamplerError(f"{folder / CONFIG} has `peft_type={config.peft_type!r}`. The sampler takes LoRA adapters.")
    config.inference_mode = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of tied weights, which `_share` has untied
        try:
            with seeded(str(next(base.parameters()).device)):  # peft draws first weights, which must not move the caller's numbers
                adapted = get_peft_model(_share(base), config)  # type: ignore[arg-type]
        except (ValueError, TypeError, RuntimeError) as error:
            raise SamplerError(f"{what}: {error}") from error
        expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        _check_shapes(*({name.removeprefix("base_model.model."): tuple(tensor.shape) for name, tensor in table.items()}
                        for table in (weights, expected)), what=what)
        set_peft_model_state_dict(adapted, weights)
        try:
            # safe: makes new tensors instead of adding into those that are shared with the base
            merged = adapted.merge_and_unload(safe_merge=True)  # type: ignore[operator]
        except ValueError as error:
            raise SamplerError(f"{folder / WEIGHTS} cannot be merged: {error}. Its weights are not finite.") from error
    return merged.eval()


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise SamplerError(f"{path} is missing. The folder is not a complete adapter; save it again.") from error
    except (SafetensorError, OSError) as error:
        raise SamplerError(f"{path} cannot be read: {error}. It is damaged or incomplete; save it again.") from error


def _share(base: torch.nn.Module) -> torch.nn.Module:
    """Return a copy whose parameters are objects of their own over the same memory, tied ones too.

    Untied, because an adapter of the output head does not touch the embedding it shares weights with.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())}
    clone = copy.deepcopy(base, memo)
    for module in clone.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(parameter.detach(), requires_grad=False)
    return clone


def _check_shapes(given: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], *, what: str) -> None:
    reasons = []
    for names, text in ((sorted(given.keys() - expected.keys()), "it has {} that the model does not have"),
                        (sorted(expected.keys() - given.keys()), "it lacks {} that the model needs")):
        if names:
            shown = ", ".join(f"`{name}`" for name in names[:3])
            reasons.append(text.format(f"{len(names)} tensors ({shown}{', ...' if len(names) > 3 else ''})"))
    reasons.extend(f"`{name}` has shape {given[name]} where the model needs {expected[name]}"
                   for name in sorted(given.keys() & expected.keys()) if given[name] != expected[name])
    if reasons:
        more = f"; and {len(reasons) - 4} more" if len(reasons) > 4 else ""
        raise SamplerError(f"{what}: {'; '.join(reasons[:4])}{more}. Use the model that it was trained on.")
