"""From the logits of the next position to a token: penalty, temperature, top-k, top-p, and the draw.

Each row draws with a number of its own, so what one prompt gets does not depend on which others stand beside it. Which number
that is, and when a completion ends, is left to `decoding`.

Notation: R rows (one a completion), V vocabulary.
"""

import hashlib
from collections.abc import Sequence

import torch

from twinkle_core.data_format import SamplingParams


def choose(
    logits_RV: torch.Tensor, params: SamplingParams, *, uniform_R: torch.Tensor, seen_RV: torch.Tensor | None,
) -> torch.Tensor:
    """Return one token a row, shape [R].

    The order is penalty, temperature, top-k, top-p. The draw inverts the cumulative distribution in fp64, whose rounding is far
    below the smallest probability that fp32 logits can express over a vocabulary of 10^5.

    Args:
        logits_RV: of the model, fp32; left as they are.
        params: temperature 0 takes the likeliest token.
        uniform_R: a number in [0, 1) a row, fp64.
        seen_RV: which tokens stand in the prompt or the completion so far; needed when there is a repetition penalty.
    """
    if seen_RV is not None:
        penalised = torch.where(logits_RV > 0, logits_RV / params.repetition_penalty, logits_RV * params.repetition_penalty)
        logits_RV = torch.where(seen_RV, penalised, logits_RV)
    if params.temperature == 0:
        return logits_RV.argmax(-1)
    # the largest logit becomes 0 before the division, so that a tiny temperature cannot overflow
    logits_RV = (logits_RV - logits_RV.amax(-1, keepdim=True)) / params.temperature
    vocab_size = logits_RV.shape[-1]
    kept_RK = None
    if params.top_p < 1 or 0 < params.top_k < vocab_size:
        count = vocab_size if params.top_k == -1 else min(params.top_k, vocab_size)
        logits_RV, kept_RK = logits_RV.topk(count, dim=-1)
    probs_RK = logits_RV.double().softmax(-1)
    if params.top_p < 1:
        before_RK = probs_RK.cumsum(-1) - probs_RK
        probs_RK = probs_RK.masked_fill(before_RK >= params.top_p, 0.0)  # the likeliest has 0 before it and always stays
    index_R = _invert(probs_RK, uniform_R)
    return index_R if kept_RK is None else kept_RK.gather(-1, index_R[:, None])[:, 0]


def _invert(probs_RK: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    cumulative_RK = probs_RK.cumsum(-1)
    total_R = cumulative_RK[:, -1]
    # below the total, else a product that rounds up to it would point behind the last token
    target_R = torch.minimum(uniform_R * total_R, torch.nextafter(total_R, torch.zeros_like(total_R)))
    index_R = torch.searchsorted(cumulative_RK, target_R[:, None], right=True)[:, 0]
    return index_R.clamp_max(probs_RK.shape[-1] - 1)  # NaN would point behind the last; its log-probability says that it is NaN


def stream_seed(*parts: int | str | Sequence[int]) -> int:
    """Return a 63-bit seed that depends on `parts` alone: the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def uniforms(seeds: Sequence[int], count: int) -> torch.Tensor:
    """Return `count` numbers in [0, 1) for each seed, shape [len(seeds), count], fp64, on the CPU.

    They come from generators of their own; torch's global generators are left alone.
    """
    rows = [torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(rows) if rows else torch.empty(0, count, dtype=torch.float64)
