"""A model without memory: the module on the meta device, and where each of its weights stands in the files.

transformers builds and checks it as for any load (`from_pretrained`), but for the weights, which stay where they are. Buffers that
are in no file (rotary frequencies) are computed here, as on one device. Filling it is left to `placing`.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from twinkle_core import session
from twinkle_core.model.file_weights import FileWeights, names_of_one
from twinkle_core.model.loading import build
from twinkle_core.warning import warn

_REASON = "loaded as a whole by every rank before it is cut: {reason}. Each rank needs memory for all of it while it loads."


class Source:
    """Where the weights of a hollow module come from.

    Attributes:
        weights: in the files.
        dtypes: parameter name -> dtype that a whole load gives it.
    """

    def __init__(self, module: Any, weights: FileWeights) -> None:
        self.weights = weights
        self.dtypes = {name: tensor.dtype for name, tensor in module.state_dict().items()}


def load_hollow(model_id: str, *, device: str, **options: Any) -> tuple[Any, Source | None]:
    """Return the causal language model of `model_id` without weights, and where they are.

    What cannot be read slice by slice (files other than safetensors, quantized weights, code that ships with the model) is loaded
    whole, with a warning, and has no source. Arguments and errors are those of `loading.load_pretrained`.
    """
    module = build(_hollow_auto_class(), model_id, device=device, **options)
    weights: FileWeights | None = vars(module).pop("_file_weights", None)
    if weights is None:
        reason = vars(module).pop("_whole_reason", "code that ships with it builds it")
        say_whole(model_id, reason)
    if issubclass(type(module), _Hollow):
        module.__class__ = type(module).__mro__[2]
    if weights is None:
        return module.to(device).eval(), None
    _move_what_is_real(module, device)
    return module.eval(), Source(module, weights)


def say_whole(model_id: str, reason: str) -> None:
    """Warn, on the first rank, that every rank holds the whole model while it loads."""
    if session.current().launcher.topology().rank == 0:
        warn(f"`{model_id}` is {_REASON.format(reason=reason)}")


def is_hollow(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no memory."""
    return tensor.device.type == "meta"


class _Hollow:
    """What is mixed into a model class while transformers builds a hollow module of it."""

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, expected_keys: Any = None,
    ) -> Any:
        """Take down where the weights are, instead of loading them. Called by `from_pretrained`."""
        reason = _why_whole(checkpoint_files, load_config)
        if reason:
            model._whole_reason = reason
            return type(model).__mro__[2]._load_pretrained_model(model, state_dict, checkpoint_files, load_config, expected_keys)  # type: ignore[attr-defined]
        _settle_dtypes(model, load_config.dtype_plan or {})
        mapping = load_config.weight_mapping or []
        weights = FileWeights(model, [Path(file) for file in checkpoint_files], mapping)
        model._weight_conversions = [conversion for conversion in mapping if conversion.was_used()]
        _check_ties(model, weights)
        for name, tensor in model.state_dict(keep_vars=True).items():
            tensor._is_hf_initialized = name in weights  # else transformers would draw them
        model._file_weights = weights
        return weights.info, None

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Tie, and find tied parameters under all their names."""
        super().tie_weights(*args, **kwargs)  # type: ignore[misc]
        weights = vars(self).get("_file_weights")
        if weights is not None:
            weights.call_alike(names_of_one(self))


def _hollow_auto_class() -> Any:
    """Return `AutoModelForCausalLM` whose model classes build hollow modules. It keeps its name, which configurations refer to."""
    auto = transformers.AutoModelForCausalLM
    return type(auto.__name__, (auto,), {"_model_mapping": _HollowClasses(auto._model_mapping), "__module__": auto.__module__})


class _HollowClasses:
    """A mapping from configuration classes to model classes, with `_Hollow` mixed into these."""

    def __init__(self, classes: Any) -> None:
        self._classes = classes

    def __getitem__(self, key: type) -> Any:
        found = self._classes[key]
        return tuple(map(_hollow_class, found)) if isinstance(found, list | tuple) else _hollow_class(found)

    def __contains__(self, key: object) -> bool:
        return key in self._classes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._classes, name)


def _hollow_class(model_class: type) -> type:
    kept = {name: getattr(model_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(model_class.__name__, (_Hollow, model_class), kept)


def _why_whole(files: Any, load_config: Any) -> str:
    if load_config.hf_quantizer is not None:
        return "its weights are quantized"
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        return "its weights are not in safetensors files"
    return ""


def _settle_dtypes(model: Any, plan: dict[str, torch.dtype]) -> None:
    """Give hollow parameters the dtypes and the flags that loading would."""
    from transformers.core_model_loading import build_glob_alternation

    pattern, globs, _ = build_glob_alternation(list(plan)) if plan else (None, {}, {})
    for name, tensor in model.state_dict(keep_vars=True).items():
        found = pattern.search(name) if pattern is not None else None
        if found is not None and found.lastgroup is not None:
            tensor.data = tensor.data.to(plan[globs[found.lastgroup]])
        if isinstance(tensor, torch.nn.Parameter):
            tensor.requires_grad_(tensor.is_floating_point())


def _check_ties(model: Any, weights: FileWeights) -> None:
    """Decide about weights that are tied by configuration and yet in the files twice, as transformers does of loaded ones."""
    for target, source in list(model.all_tied_weights_keys.items()):
        if target not in weights or source not in weights:
            continue
        if weights.are_equal(target, source):
            weights.leave_out(target)
        else:
            model.all_tied_weights_keys.pop(target)
            logging.get_logger("transformers.modeling_utils").warning(
                f"`{target}` is tied to `{source}` by the configuration, but the files hold different values for them: they are "
                "not tied.")


def _move_what_is_real(module: torch.nn.Module, device: str) -> None:
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for tensor in held.values():
                if tensor is not None and not is_hollow(tensor):
                    tensor.data = tensor.data.to(device)
