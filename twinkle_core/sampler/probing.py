"""Whether a model can be decoded as `decoding` does it: with a key-value cache, and with padding in front of shorter prompts.

Some architectures ignore the cache, or let padding into their recurrent state, and give wrong numbers without an error (measured
with transformers 5.19: Mamba ignores it, RecurrentGemma takes padding in). So a few tokens are read in both ways once and compared.
"""

from typing import Any

import torch

from twinkle_core.errors import SamplerError
from twinkle_core.sampler.decoding import PromptReader

_LONG, _SHORT, _NEXT = 9, 3, 2
"""Tokens of the long prompt, of the short one that is padded to it, and of its continuation."""

_TOLERANCE = {torch.float32: 0.003, torch.float64: 0.003}
_TOLERANCE_16_BIT = 0.05
"""Mean difference of log-probabilities / their standard deviation. Rounding stays below a third of it, faults are near 1."""


@torch.inference_mode()
def can_pad(model: Any, *, what: str) -> bool:
    """Return whether shorter prompts may be padded; if not, only prompts of one length may stand in a batch.

    `what` names the model in an error. Raises: `SamplerError` if the model cannot be decoded with a key-value cache.
    """
    vocab_size = model.get_input_embeddings().weight.shape[0]
    long, short, following = ([(step * place + 7) % vocab_size for place in range(1, count + 1)]
                              for step, count in ((37, _LONG), (53, _SHORT), (29, _NEXT)))
    ids = torch.tensor([short + following], device=next(model.parameters()).device)
    plain_TV = model(input_ids=ids, use_cache=False).logits[0, _SHORT - 1:].float().log_softmax(-1)
    if not plain_TV.isfinite().all():
        return True  # sampling says that the weights are not finite
    tolerance = _TOLERANCE.get(model.dtype, _TOLERANCE_16_BIT)

    def difference(prompts: list[list[int]]) -> float:
        logits_TV = torch.stack([logits[-1] for logits in _decode(model, prompts, following)])
        return ((logits_TV.log_softmax(-1) - plain_TV).abs().mean() / plain_TV.std()).item()

    try:
        if difference([long, short]) <= tolerance:
            return True
        alone = difference([short])
    except (ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:  # the boundary to the model's own code
        raise SamplerError(f"`TorchSampler` cannot sample from {what}: with transformers' `DynamicCache` its code raised "
                           f"{type(error).__name__}: {error}. Use another sampler.") from error
    if alone > tolerance:
        raise SamplerError(f"`TorchSampler` cannot sample from {what}: with a key-value cache its log-probabilities differ from "
                           f"those without by {alone:.2f} standard deviations. Use another sampler.")
    return False


def _decode(model: Any, prompts: list[list[int]], following: list[int]) -> list[torch.Tensor]:
    reader = PromptReader(model, prompts)
    steps = [reader.read()]
    reader.reserve(len(following))
    steps.extend(reader.advance(torch.tensor([token] * len(prompts), device=reader.device)) for token in following)
    return steps
