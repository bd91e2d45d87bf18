"""Policy-gradient losses on sampled answers: what GRPO and its relatives share.

Each of them gives every token an objective; here are importance ratios, the truncated correction for a sampler that differs from
the trainer, the KL penalty, and by what the sum is divided. Advantages are made from rewards in `twinkle_core.advantage`.

Notation: B sequences, T positions. pi is the model being trained, old the trainer's weights that the answers were sampled with,
sampler the program that sampled them (which may round otherwise), ref the reference model.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch

from twinkle_core.data_format import IGNORE_INDEX
from twinkle_core.errors import ArgumentError, ModelError, did_you_mean, listing
from twinkle_core.loss.interface import Loss

if TYPE_CHECKING:
    from twinkle_core.loss.interface import LossResult
    from twinkle_core.processor import TokenOutputs

Normalization = Literal["token", "sequence", "drgrpo"]

REFERENCE = "`ref_logprobs=model.forward_only(inputs=batch, disable_lora=True)[\"logprobs\"]`, or those of another model"
"""How to get the log-probabilities of a reference model."""

_MOST_LOG_RATIO = 20.0
"""Ratios beyond e^20 are no longer told apart: an infinite one would give 0 * inf = NaN in the backward pass of a clip."""


class PolicyLoss(Loss):
    """Minus the mean over tokens of an objective, plus `beta` times an estimate of KL(pi || ref).

    Inputs:
        advantages: one number a sequence, or one a token.
        old_logprobs: log old of each token. Left out, old is the present model: the ratio is 1 and has a gradient (on-policy).
        sampler_logprobs: log sampler of each token. The features of a `SampleResponse` bring it along. Without `tis_cap`, it serves
            as `old_logprobs` where these are not given.
        ref_logprobs: log ref of each token; needed for `beta` > 0.

    Args:
        beta: weight of the KL penalty, estimated by k3 = ref/pi - log(ref/pi) - 1 (Schulman 2020, "Approximating KL divergence").
        normalization: what is averaged. "token": every token of the batch counts alike (Yu et al. 2025, DAPO, eq. 8). "sequence":
            every sequence counts alike, by the mean of its tokens (Shao et al. 2024, DeepSeekMath, eq. 3). "drgrpo": every sequence
            by the sum of its tokens / `max_tokens` (Liu et al. 2025, Dr. GRPO, sec. 3.2). Sequences without a supervised token do
            not count.
        tis_cap: C of truncated importance sampling: each token's objective is multiplied by min(old / sampler, C), without a
            gradient, which corrects for a sampler that is not quite the trainer (Yao et al. 2025, "Your efficient RL framework
            secretly brings you off-policy RL training"). None: off. Where only one of `old_logprobs` and `sampler_logprobs` is
            given, it is the sampler's, and old is the present model.
        max_tokens: the constant of "drgrpo", in tokens: the most that could be sampled. It scales the loss and nothing else.
    """

    advice: ClassVar[Mapping[str, str]] = {
        "advantages": "`advantages=GRPOAdvantage()(rewards, num_generations=n)`, one number a sequence",
        "ref_logprobs": REFERENCE,
    }
    takes_token_advantages: ClassVar[bool] = True

    def __init__(self, *, beta: float, normalization: Normalization, tis_cap: float | None, max_tokens: int = 1024) -> None:
        if normalization not in get_args(Normalization):
            raise ArgumentError(f"`normalization={normalization!r}`: use one of {listing(get_args(Normalization))}."
                                f"{did_you_mean(str(normalization), get_args(Normalization))}")
        check_number("beta", beta)
        if tis_cap is not None:
            check_number("tis_cap", tis_cap, above_zero=True)
        check_number("max_tokens", max_tokens, above_zero=True)
        self.beta, self.normalization, self.tis_cap, self.max_tokens = beta, normalization, tis_cap, max_tokens

    @abstractmethod
    def objective(self, ratio: torch.Tensor, advantages: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
        """Return what is to be made large, [B, T], of `ratio` (pi / old), `advantages` and `logprobs` [B, T]. What it gives for a
        token that is not supervised does not matter."""

    def log_ratio(self, difference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of the importance ratio [B, T] from log pi - log old [B, T], which is 0 outside of `mask`."""
        return difference

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride] - a loss names the inputs it takes
        self, outputs: "TokenOutputs", targets: torch.Tensor, *, advantages: torch.Tensor,
        old_logprobs: torch.Tensor | None = None, sampler_logprobs: torch.Tensor | None = None,
        ref_logprobs: torch.Tensor | None = None,
    ) -> "LossResult":
        """Return the sum and by what it is divided: tokens, or sequences."""
        if advantages.ndim > 1 and not self.takes_token_advantages:
            raise ModelError(f"`{type(self).__name__}` has one ratio a sequence, and got `advantages` a token. Pass one number a "
                             "sequence, or use `GRPOLoss`.")
        logprobs, mask = outputs.logprobs, targets != IGNORE_INDEX
        old, sampler = self._old_and_sampler(logprobs, old_logprobs, sampler_logprobs)
        difference = torch.where(mask, logprobs - old, 0.0)
        ratio = torch.exp(self.log_ratio(difference, mask).clamp(max=_MOST_LOG_RATIO))
        value = -self.objective(ratio, spread(advantages.to(logprobs.dtype), mask), logprobs)
        if self.tis_cap is not None:
            correction = torch.where(mask, old.detach() - sampler, 0.0).clamp(max=_MOST_LOG_RATIO)
            value = value * torch.exp(correction).clamp(max=self.tis_cap)
        if self.beta:
            if ref_logprobs is None:
                raise missing_input(self, f"`beta={self.beta}`", "ref_logprobs")
            value = value + self.beta * k3(torch.where(mask, ref_logprobs - logprobs, 0.0))
        return self._normalised(torch.where(mask, value, 0.0), mask)

    def _old_and_sampler(
        self, logprobs: torch.Tensor, old: torch.Tensor | None, sampler: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        present = logprobs.detach()
        if self.tis_cap is None:
            chosen = old if old is not None else sampler
            return (present if chosen is None else chosen), present
        if old is None and sampler is None:
            raise missing_input(self, f"`tis_cap={self.tis_cap}`", "sampler_logprobs")
        if old is None or sampler is None:
            return present, old if sampler is None else sampler  # type: ignore[return-value]
        return old, sampler

    def _normalised(self, value: torch.Tensor, mask: torch.Tensor) -> "LossResult":
        if self.normalization == "token":
            return value.sum(), mask.sum()
        lengths = mask.sum(1)
        if self.normalization == "drgrpo":
            return value.sum() / self.max_tokens, (lengths > 0).sum()
        return (value.sum(1) / lengths.clamp(min=1)).sum(), (lengths > 0).sum()


def spread(numbers: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return numbers a sequence [B], or a token [B, T], as [B, T]."""
    return numbers[:, None].expand(mask.shape) if numbers.ndim == 1 else numbers


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return x - log x - 1 of x = exp(log_ratio): an estimate of KL(p || q) >= 0 from samples of p, with x = q / p."""
    return torch.expm1(log_ratio.clamp(max=_MOST_LOG_RATIO)) - log_ratio


def missing_input(loss: Loss, because: str, name: str) -> ModelError:
    """Return the error for an input that an option of the loss needs."""
    advice = loss.advice.get(name, f"`{name}=`, a list with one number a token for each sequence")
    return ModelError(f"`{type(loss).__name__}` with {because} needs `{name}`, which this call did not get. Pass {advice}.")


def check_number(name: str, value: object, *, above_zero: bool = False) -> None:
    """Raise `ArgumentError` unless `value` is a finite number >= 0, or > 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (above_zero and not value):  # type: ignore[operator]
        raise ArgumentError(f"`{name}={value!r}`: use a finite number {'> 0' if above_zero else '>= 0'}.")
