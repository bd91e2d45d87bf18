"""Whether a processor fits a model, and above all whether the model may have several sequences in one row."""

from typing import TYPE_CHECKING, Any

import torch

from twinkle_core import registry
from twinkle_core.errors import ArgumentError, ModelError

if TYPE_CHECKING:
    from twinkle_core.model.forward import ModuleRunner
    from twinkle_core.processor import InputProcessor

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_TOLERANCE = 1e-3
"""Packed against single in fp32, relative to the largest hidden state. Qwen3.5's state leaks 0.034; noise is 1e-6."""
_TOLERANCE_16_BIT = 1e-2
"""With one neighbour against with another, whose arithmetic is the same to the bit where nothing leaks (measured 0 in full, sliding
and expert models in bf16 and fp16); Qwen3.5 leaks 0.08, RecurrentGemma 0.16."""


def fit_processor(processor: "InputProcessor", runner: "ModuleRunner") -> None:
    """Hold what a processor does against the model, and let it make long packed rows where attention skips what is masked.

    Raises: `ArgumentError` for padding that the vocabulary lacks; what `check_packing` raises.
    """
    config = runner.module.config
    vocab_size = config.get_text_config().vocab_size
    if processor.pad_token_id >= vocab_size:
        raise ArgumentError(f"`pad_token_id={processor.pad_token_id}`: this model has the tokens 0 to {vocab_size - 1}. Use one of "
                            "these; 0 is as good as any, for nothing attends to padding.")
    if processor.packing:
        check_packing(runner)
        if "flash" in str(config._attn_implementation):
            processor.row_cost = None  # these kernels skip what is masked, and know packed rows only one at a time


def check_packing(runner: "ModuleRunner") -> None:
    """Raise `ModelError` unless sequences that share a row do not see each other.

    Recurrent layers are known by family or configuration; beyond that short sequences are run with neighbours and without.
    """
    config = runner.module.config.get_text_config()
    reason = recurrent_reason(config) or _leak(runner)
    if reason is not None:
        name = type(runner.module).__name__
        raise ModelError(f"`packing=True`: sequences in one row of `{name}` would see each other: {reason}. Leave "
                         "`packing` out; `micro_batch_size=` and rows of similar length also save padding.")


def recurrent_reason(config: Any) -> str | None:
    """Return why the model carries state from token to token, or None if nothing says that it does."""
    families = registry.names("model_families")
    for model_type in {config.model_type, config.model_type.removesuffix("_text")}:
        if model_type in families and registry.resolve("model_families", model_type).has_recurrent_layers:
            return f"the family `{model_type}` has recurrent layers, whose state runs on"
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION)
    return f"it has layers of the kind {', '.join(f'`{kind}`' for kind in kinds)}, whose state runs on" if kinds else None


def _leak(runner: "ModuleRunner") -> str | None:
    module = runner.module
    device = next(module.parameters()).device
    size = module.get_input_embeddings().weight.shape[0]
    first, other, second = (((torch.arange(count, device=device) + start) % size) for count, start in ((5, 0), (5, 7), (4, 3)))
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad(), runner.precision.autocast():
            positions = torch.cat([torch.arange(5), torch.arange(4)])[None].to(device)
            packed, beside_other = (
                runner.hidden(torch.cat([neighbour, second])[None], positions)[0, 5:] for neighbour in (first, other))
            single = runner.hidden(second[None])[0]
    finally:
        module.train(was_training)
    is_wide = next(module.parameters()).dtype in (torch.float32, torch.float64) and not runner.precision.is_autocast
    if is_wide:
        difference, than = _difference(packed, single), "the sequences run singly"
    else:
        difference, than = _difference(packed, beside_other), "that beside another sequence"
    tolerance = _TOLERANCE if is_wide else _TOLERANCE_16_BIT
    return None if difference < tolerance else f"a test run differs by {difference:.2g} from {than}"


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())
