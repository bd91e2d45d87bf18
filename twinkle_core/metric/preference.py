"""Numbers about preference pairs."""

from typing import TYPE_CHECKING, Any

from twinkle_core.data_format import IGNORE_INDEX
from twinkle_core.errors import ArgumentError, checks_keywords
from twinkle_core.metric.policy import SumMetric
from twinkle_core.processor.pairs import answer_logprobs, split_pairs

if TYPE_CHECKING:
    import torch

    from twinkle_core.processor import TokenOutputs


class DPOMetric(SumMetric):
    """Implicit rewards of the chosen and the rejected answers, over pairs: beta (log pi(y) - log ref(y)).

    `chosen_reward`, `rejected_reward`, `reward_margin` (their difference) and `reward_accuracy` (share of pairs whose chosen answer
    has the larger one). Where the loss takes no `ref_logprobs` the reward is beta log pi(y). Source: Rafailov et al. 2023, sec. 4.

    Args:
        beta: the loss's.
    """

    names = ("pairs", "chosen", "rejected", "right")

    @checks_keywords
    def __init__(self, beta: float = 0.1) -> None:
        if not isinstance(beta, int | float) or not beta > 0:
            raise ArgumentError(f"`beta={beta!r}`: use a number > 0, the loss's.")
        super().__init__()
        self.beta = beta

    def accumulate(self, outputs: "TokenOutputs", targets: "torch.Tensor", **inputs: Any) -> None:
        """Take in a micro-batch of pairs."""
        mask = targets != IGNORE_INDEX
        rewards = outputs.logprobs.double().sum(1)
        if inputs.get("ref_logprobs") is not None:
            rewards = rewards - answer_logprobs(inputs["ref_logprobs"].double(), mask)
        chosen, rejected = split_pairs(self.beta * rewards)
        self.add(pairs=chosen.shape[0], chosen=chosen.sum(), rejected=rejected.sum(), right=(chosen > rejected).sum())

    def compute(self, state: dict[str, float]) -> dict[str, float]:
        """Return the means; nothing where there was no pair."""
        if not state["pairs"]:
            return {}
        chosen, rejected = state["chosen"] / state["pairs"], state["rejected"] / state["pairs"]
        return {"chosen_reward": chosen, "rejected_reward": rejected, "reward_margin": chosen - rejected,
                "reward_accuracy": state["right"] / state["pairs"]}
