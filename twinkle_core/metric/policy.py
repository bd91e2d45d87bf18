"""Numbers about policy-gradient steps: how far the policy has moved, and what the answers were worth.

Each is a mean over all tokens, or sequences, of what ran on all data ranks.
"""

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar

from twinkle_core.data_format import IGNORE_INDEX
from twinkle_core.errors import ArgumentError, checks_keywords
from twinkle_core.metric.interface import Metric

if TYPE_CHECKING:
    import torch

    from twinkle_core.processor import TokenOutputs


class SumMetric(Metric):
    """A metric whose state is sums by name."""

    names: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._sums = dict.fromkeys(self.names, 0.0)

    def state(self) -> dict[str, float]:
        """Return the sums."""
        return dict(self._sums)

    def reset(self) -> None:
        """Forget the sums."""
        self._sums = dict.fromkeys(self.names, 0.0)

    def add(self, **numbers: "torch.Tensor | float") -> None:
        """Add to the sums."""
        for name, number in numbers.items():
            self._sums[name] += float(number)


class GRPOMetric(SumMetric):
    """How a policy loss sees its tokens. What it needs and the loss did not get is left out of its answer.

    * `entropy`: minus the mean log-probability of the trained tokens. Where the present model has sampled them, at temperature 1,
      its expectation is the entropy a token, in nats.
    * `policy_kl`: k3 estimate of KL(old || present), with x = present / old (Schulman 2020, "Approximating KL divergence").
    * `ref_kl`: k3 estimate of KL(present || reference), needs `ref_logprobs`.
    * `clip_fraction`: share of tokens whose ratio is outside of the range, on the side where a clip takes the gradient away.
    * `sampler_gap`: mean absolute difference of the trainer's and the sampler's log-probabilities of a token. The trainer's
      are `old_logprobs` if they were given beside the sampler's, else the present ones.

    Args:
        epsilon: the loss's, as `epsilon_high`: of the range.
        epsilon_high: None: `epsilon`.
    """

    names = ("tokens", "surprise", "kl_tokens", "policy_kl", "ref_tokens", "ref_kl", "clipped_of", "clipped", "gap_tokens", "gap")

    @checks_keywords
    def __init__(self, epsilon: float = 0.2, epsilon_high: float | None = None) -> None:
        for name, value in (("epsilon", epsilon), ("epsilon_high", epsilon if epsilon_high is None else epsilon_high)):
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ArgumentError(f"`{name}={value!r}`: use a finite number >= 0.")
        super().__init__()
        self.epsilon, self.epsilon_high = epsilon, epsilon if epsilon_high is None else epsilon_high

    def accumulate(self, outputs: "TokenOutputs", targets: "torch.Tensor", **inputs: Any) -> None:
        """Take in a micro-batch."""
        import torch

        mask = targets != IGNORE_INDEX
        count, logprobs = mask.sum(), outputs.logprobs.double()
        self.add(tokens=count, surprise=-logprobs.sum())
        old, sampler = inputs.get("old_logprobs"), inputs.get("sampler_logprobs")
        if sampler is not None:
            trainers = logprobs if old is None else old
            self.add(gap_tokens=count, gap=torch.where(mask, trainers - sampler, 0.0).abs().sum())
        old = sampler if old is None else old
        if old is not None:
            log_ratio = torch.where(mask, logprobs - old, 0.0)
            self.add(kl_tokens=count, policy_kl=(torch.expm1(log_ratio) - log_ratio).sum())
            if "advantages" in inputs:
                self.add(clipped_of=count, clipped=self._clipped(log_ratio.exp(), inputs["advantages"], mask))
        if inputs.get("ref_logprobs") is not None:
            log_ratio = torch.where(mask, inputs["ref_logprobs"] - logprobs, 0.0)
            self.add(ref_tokens=count, ref_kl=(torch.expm1(log_ratio) - log_ratio).sum())

    def _clipped(self, ratio: "torch.Tensor", advantages: "torch.Tensor", mask: "torch.Tensor") -> "torch.Tensor":
        weights = advantages[:, None] if advantages.ndim == 1 else advantages
        return (mask & (((ratio > 1 + self.epsilon_high) & (weights > 0)) | ((ratio < 1 - self.epsilon) & (weights < 0)))).sum()

    def compute(self, state: dict[str, float]) -> dict[str, float]:
        """Return the numbers that there are."""
        of = {"entropy": ("surprise", "tokens"), "policy_kl": ("policy_kl", "kl_tokens"), "ref_kl": ("ref_kl", "ref_tokens"),
              "clip_fraction": ("clipped", "clipped_of"), "sampler_gap": ("gap", "gap_tokens")}
        return {name: state[total] / state[count] for name, (total, count) in of.items() if state[count]}


class CompletionRewardMetric(SumMetric):
    """`reward`, `reward_std` (population standard deviation) and `completion_length` (trained tokens), over sequences.

    Pass the rewards beside the inputs, for this metric alone: `forward_backward(inputs=..., advantages=..., rewards=rewards)`.
    """

    inputs: ClassVar[Collection[str]] = ("rewards",)
    names = ("sequences", "tokens", "rewards", "reward", "square")

    def accumulate(self, outputs: "TokenOutputs", targets: "torch.Tensor", **inputs: Any) -> None:
        """Take in a micro-batch."""
        self.add(sequences=targets.shape[0], tokens=(targets != IGNORE_INDEX).sum())
        rewards = inputs.get("rewards")
        if rewards is not None:
            wide = rewards.double()
            self.add(rewards=wide.shape[0], reward=wide.sum(), square=(wide * wide).sum())

    def compute(self, state: dict[str, float]) -> dict[str, float]:
        """Return the numbers; those of rewards where there were any."""
        numbers: dict[str, float] = {}
        if state["rewards"]:
            mean = state["reward"] / state["rewards"]
            variance = state["square"] / state["rewards"] - mean * mean
            numbers |= {"reward": mean, "reward_std": math.sqrt(max(0.0, variance))}
        if state["sequences"]:
            numbers["completion_length"] = state["tokens"] / state["sequences"]
        return numbers
