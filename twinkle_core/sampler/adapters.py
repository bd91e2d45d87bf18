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
from twinkle_core.model import identity
from twinkle_core.model.layout import ADAPTER_CONFIG, adapter_weights, read_weights
from twinkle_core.model.loading import seeded
from twinkle_core.model.merging import plain_weights

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
        self.synchronised: torch.nn.Module | None = None  # the base with the adapter that a model has sent

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
        if uri is not None:
            return self._get_by_uri(uri)
        return self.base if self.synchronised is None else self.synchronised

    def clear(self) -> None:
        """Forget every copy: needed when the weights of the base model change, which the copies share in part."""
        self._by_name.clear()
        self._by_uri.clear()
        self.synchronised = None

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
        try:
            if is_checkpoint(folder):
                self._check_identity(folder)
            if (folder / ADAPTER_CONFIG).exists():
                return merge_adapter(self.base, read_config(folder), dict(read_weights(folder)), where=folder,
                                     what=f"`{uri}` does not fit `{self.model_id}`")
            return self._load_full(folder, uri)
        except CheckpointError as error:
            raise SamplerError(f"The checkpoint `{uri}` cannot be used with `{self.model_id}`: {error}") from error

    def _check_identity(self, folder: Path) -> None:
        """Hold a manifest against the model. An adapter of other weights is an error here, where `TransformersModel.load` warns:
        it may be trained on, but what is sampled through it is of neither model."""
        saved = verify(folder).identity
        identity.check_model(folder, saved.get("model", {}), identity.describe_model(self.base.config.to_dict()))
        if identity.differs(saved.get("base_samples", {}), identity.sample_weights(plain_weights(self.base))):
            raise CheckpointError(f"it is an adapter of `{saved.get('model_id')}`, whose weights are others, though the sizes are "
                                  "the same. Sample with the model that it was trained on.")

    def _load_full(self, folder: Path, uri: str) -> torch.nn.Module:
        if not (folder / "config.json").exists():
            names = listing(path.name for path in folder.iterdir())
            raise SamplerError(f"`{uri}` is not a checkpoint: {folder} has neither `{ADAPTER_CONFIG}` (a LoRA) nor `config.json` "
                               f"(a model). It holds: {names}. Pass what `save` returned.")
        try:
            model = self._load_model(folder)
        except (ModelError, HubError) as error:
            raise SamplerError(f"The checkpoint `{uri}` cannot be loaded: {error}") from error
        given, expected = ({name: tuple(tensor.shape) for name, tensor in each.state_dict().items()} for each in (model, self.base))
        identity.check_shapes(folder, given, expected, is_exact=True)
        return model


def locate(uri: str) -> Path:
    """Return the folder of a checkpoint: a path, or the URI of a hub. Raises: `SamplerError` if there is none."""
    if not isinstance(uri, str) or not uri:
        raise ArgumentError(f"`adapter_uri={uri!r}`: pass the string that `save` returned.")
    try:
        folder = resolve_model(uri) if "://" in uri else Path(uri).expanduser()
        is_folder = folder.is_dir()
    except (HubError, OSError, RuntimeError) as error:  # the last two: a path that is too long, or `~` of nobody
        raise SamplerError(f"The adapter `{uri[:200]}` cannot be found: {str(error)[:400]}") from error
    if not is_folder:
        raise SamplerError(f"The adapter `{uri}` is not a folder (looked at {folder.absolute()}). Pass what `save` returned.")
    return folder


def fingerprint_of(folder: Path) -> Fingerprint:
    """Return what changes when a file of `folder` is written again, even with the same size and modification time."""
    files = (path for path in sorted(folder.iterdir()) if path.suffix in (".safetensors", ".json"))
    stats = [(path.name, path.stat()) for path in files if path.exists()]  # a link may lead nowhere
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for name, stat in stats)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the fields of an adapter's configuration. Raises: `SamplerError` for one that cannot be used."""
    from peft import LoraConfig, PeftConfig

    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError) as error:
        raise SamplerError(f"{folder / ADAPTER_CONFIG} cannot be read: {error}. Save the adapter again.") from error
    if not isinstance(config, LoraConfig):
        raise SamplerError(f"{folder / ADAPTER_CONFIG} has `peft_type={config.peft_type!r}`. The sampler takes LoRA adapters.")
    return config.to_dict()


def merge_adapter(
    base: torch.nn.Module, fields: Mapping[str, Any], weights: dict[str, torch.Tensor], *, where: Any, what: str,
) -> torch.nn.Module:
    """Return a copy of `base` with a LoRA merged in; weights it does not change share memory with `base`.

    `fields` are those of its configuration, `weights` have the names of peft's files. `where` they come from and `what` does not
    fit stand in the text of an error. Unlike `plain_weights(merge=)` this never adds into the memory of the base for a while.

    Raises: `CheckpointError` if the weights cannot be read, or if their names or shapes do not match; `SamplerError` for a
        configuration that cannot be used.
    """
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    config = LoraConfig(**{name: value for name, value in fields.items() if name in LoraConfig.__dataclass_fields__})
    config.inference_mode = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of tied weights, which `_share` has untied
        try:
            with seeded(str(next(base.parameters()).device)):  # peft draws first weights, which must not move the caller's numbers
                adapted = get_peft_model(_share(base), config)  # type: ignore[arg-type]
        except (ValueError, TypeError, RuntimeError) as error:
            raise SamplerError(f"{what}: {error}") from error
        given, expected = ({name: tuple(tensor.shape) for name, tensor in table.items()}
                           for table in (weights, adapter_weights(adapted, "default")))
        identity.check_shapes(where, given, expected, is_exact=True)
        set_peft_model_state_dict(adapted, weights)
        try:
            # safe: makes new tensors instead of adding into those that are shared with the base
            merged = adapted.merge_and_unload(safe_merge=True)  # type: ignore[operator]
        except ValueError as error:
            raise SamplerError(f"`{where}` cannot be merged: {error}. Its weights are not finite.") from error
    return merged.eval()


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
