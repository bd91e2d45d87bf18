"""The losses of group-relative policy optimization: GRPO, GSPO, CISPO, SAPO, BNPO.

They differ in how far one update may go: a clipped ratio of each token or of the sequence, a clipped weight, or a soft gate. What
they share stands in `twinkle_core.loss.policy`.
"""

from typing import ClassVar

import torch

from twinkle_core.errors import checks_keywords
from twinkle_core.loss.policy import Normalization, PolicyLoss, check_number


class GRPOLoss(PolicyLoss):
    """The clipped objective: min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon_high) A) a token.

    Source: Shao et al. 2024, DeepSeekMath, eq. 3; the clip is that of Schulman et al. 2017 (PPO), eq. 7. `epsilon_high` above
    `epsilon` is the clip-higher of Yu et al. 2025 (DAPO), eq. 8, whose token mean is the default here.

    Args:
        epsilon: how far below 1 a ratio may push.
        epsilon_high: how far above 1; None: `epsilon`.
        beta: see `PolicyLoss`, as all that follow.
        normalization: "token", "sequence" or "drgrpo".
        tis_cap: cap of truncated importance sampling, or None.
        max_tokens: the constant that "drgrpo" divides by.
    """

    @checks_keywords
    def __init__(
        self, epsilon: float = 0.2, epsilon_high: float | None = None, beta: float = 0.0, normalization: Normalization = "token",
        tis_cap: float | None = None, *, max_tokens: int = 1024,
    ) -> None:
        super().__init__(beta=beta, normalization=normalization, tis_cap=tis_cap, max_tokens=max_tokens)
        self.epsilon, self.epsilon_high = _range(epsilon, epsilon_high)

    def objective(self, ratio: torch.Tensor, advantages: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
        """Return the smaller of the plain and the clipped objective."""
        return torch.minimum(ratio * advantages, ratio.clamp(1 - self.epsilon, 1 + self.epsilon_high) * advantages)


class BNPOLoss(GRPOLoss):
    """The clipped objective, averaged over all tokens of the batch: the whole global batch, however it was cut.

    What trainers of language models call BNPO (TRL's and ms-swift's `loss_type="bnpo"`) divides by the tokens of one device's
    batch; dividing by those of the global batch is the same on one device and does not change with the number of them. So it is
    `GRPOLoss(normalization="token")` under that name. The Beta normalisation of Xiao et al. 2025 ("BNPO: Beta normalization policy
    optimization", sec. 3) concerns the advantages, not the loss, and is not made here.
    """

    @checks_keywords
    def __init__(
        self, epsilon: float = 0.2, epsilon_high: float | None = None, beta: float = 0.0, tis_cap: float | None = None,
    ) -> None:
        super().__init__(epsilon, epsilon_high, beta, "token", tis_cap)


class GSPOLoss(PolicyLoss):
    """The clipped objective with one ratio a sequence: (pi(y) / old(y)) to the power of 1 / |y|, the geometric mean of its tokens'.

    Source: Zheng et al. 2025, "Group sequence policy optimization", eq. 5 and 7. Every sequence counts alike. The paper's range is
    far narrower than PPO's: 3e-4 below and 4e-4 above (sec. 5.1), for ratios of sequences are near 1.

    Args:
        epsilon: how far below 1 a ratio may push.
        epsilon_high: how far above 1; None: `epsilon`.
        beta: weight of the KL penalty, a mean over the tokens of each sequence.
        tis_cap: cap of truncated importance sampling a token, or None.
    """

    takes_token_advantages: ClassVar[bool] = False

    @checks_keywords
    def __init__(
        self, epsilon: float = 3e-4, epsilon_high: float | None = None, beta: float = 0.0, tis_cap: float | None = None,
    ) -> None:
        super().__init__(beta=beta, normalization="sequence", tis_cap=tis_cap)
        self.epsilon, self.epsilon_high = _range(epsilon, epsilon_high)

    def log_ratio(self, difference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the mean over a sequence's tokens, at each of them."""
        mean_b = difference.sum(1) / mask.sum(1).clamp(min=1)
        return mean_b[:, None].expand(difference.shape)

    def objective(self, ratio: torch.Tensor, advantages: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
        """Return the sequence's objective at each of its tokens, whose mean it is."""
        return torch.minimum(ratio * advantages, ratio.clamp(1 - self.epsilon, 1 + self.epsilon_high) * advantages)


class CISPOLoss(PolicyLoss):
    """REINFORCE with a clipped importance weight: weight A log pi, where weight = clip(ratio, 1 - epsilon, 1 + epsilon_high) has no
    gradient, so that no token loses its own.

    Source: MiniMax 2025, "MiniMax-M1", sec. 3.1, eq. 4 and 5; the mean is over tokens. As there, the defaults do not bound the
    weight from below; the upper bound of 5 is that of Khatri et al. 2025 ("The art of scaling reinforcement learning compute for
    LLMs").

    Args:
        epsilon: how far below 1 a weight may lie.
        epsilon_high: how far above 1; None: `epsilon`.
        beta: weight of the KL penalty.
        normalization: "token", "sequence" or "drgrpo".
        tis_cap: cap of truncated importance sampling, or None.
        max_tokens: the constant that "drgrpo" divides by.
    """

    @checks_keywords
    def __init__(
        self, epsilon: float = 1.0, epsilon_high: float | None = 4.0, beta: float = 0.0, normalization: Normalization = "token",
        tis_cap: float | None = None, *, max_tokens: int = 1024,
    ) -> None:
        super().__init__(beta=beta, normalization=normalization, tis_cap=tis_cap, max_tokens=max_tokens)
        self.epsilon, self.epsilon_high = _range(epsilon, epsilon_high)

    def objective(self, ratio: torch.Tensor, advantages: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
        """Return weight A log pi."""
        return ratio.detach().clamp(1 - self.epsilon, 1 + self.epsilon_high) * advantages * logprobs


class SAPOLoss(PolicyLoss):
    """A soft gate in place of a clip: 4 / tau sigmoid(tau (ratio - 1)) A, with tau by the sign of A.

    At a ratio of 1 its gradient is that of ratio A, and it fades smoothly to both sides. Source: Gao et al. 2025, "Soft adaptive
    policy optimization", sec. 3; every sequence counts alike, as there.

    Args:
        tau_pos: temperature for advantages > 0.
        tau_neg: temperature for the others; larger, because pushing a token down raises many others.
        beta: weight of the KL penalty.
        normalization: "token", "sequence" or "drgrpo".
        tis_cap: cap of truncated importance sampling, or None.
        max_tokens: the constant that "drgrpo" divides by.
    """

    @checks_keywords
    def __init__(
        self, tau_pos: float = 1.0, tau_neg: float = 1.05, beta: float = 0.0, normalization: Normalization = "sequence",
        tis_cap: float | None = None, *, max_tokens: int = 1024,
    ) -> None:
        super().__init__(beta=beta, normalization=normalization, tis_cap=tis_cap, max_tokens=max_tokens)
        check_number("tau_pos", tau_pos, above_zero=True)
        check_number("tau_neg", tau_neg, above_zero=True)
        self.tau_pos, self.tau_neg = tau_pos, tau_neg

    def objective(self, ratio: torch.Tensor, advantages: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
        """Return the gated advantage."""
        tau = torch.full_like(advantages, self.tau_neg).masked_fill(advantages > 0, self.tau_pos)
        return 4.0 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages


def _range(epsilon: float, epsilon_high: float | None) -> tuple[float, float]:
    check_number("epsilon", epsilon)
    if epsilon_high is not None:
        check_number("epsilon_high", epsilon_high)
    return epsilon, epsilon if epsilon_high is None else epsilon_high
