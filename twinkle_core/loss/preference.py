"""Losses of preference pairs: DPO, SimPO, ORPO, CPO.

Rows alternate, the chosen answer and then the rejected one, as `Dataset.encode()` makes them of rows with both. Each loss is a sum
over pairs, and pairs are what it counts, so the gradient is the mean over all pairs of the global batch.

Notation: P pairs; pi(y) the probability of an answer, the product of its supervised tokens'; |y| their number; w the chosen (won),
l the rejected (lost).
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, get_args

import torch
from torch.nn.functional import logsigmoid

from twinkle_core.data_format import IGNORE_INDEX
from twinkle_core.errors import ArgumentError, ModelError, checks_keywords, did_you_mean, listing
from twinkle_core.loss.interface import Loss
from twinkle_core.loss.policy import REFERENCE, check_number
from twinkle_core.processor.pairs import answer_logprobs, split_pairs

if TYPE_CHECKING:
    from twinkle_core.loss.interface import LossResult
    from twinkle_core.processor import TokenOutputs

Kind = Literal["sigmoid", "hinge", "ipo"]

_LEAST_SURPRISE = 1e-6
"""A mean log-probability is taken to be this far below 0 in odds, which are infinite at probability 1."""


class Answers(NamedTuple):
    """The sums [P] of log-probabilities and the numbers of supervised tokens [P] of one side of the pairs."""

    logprobs: torch.Tensor
    lengths: torch.Tensor

    @property
    def means(self) -> torch.Tensor:
        """Mean log-probability of a token, [P]."""
        return self.logprobs / self.lengths.clamp(min=1)


class PairLoss(Loss):
    """A loss that compares answers by the present model alone."""

    requires_pairs: ClassVar[bool] = True

    @abstractmethod
    def of_pairs(self, chosen: Answers, rejected: Answers) -> torch.Tensor:
        """Return the loss of each pair, [P]."""

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride] - a loss names the inputs it takes: here none
        self, outputs: "TokenOutputs", targets: torch.Tensor,
    ) -> "LossResult":
        """Return (the sum over pairs, how many there are)."""
        chosen, rejected = _answers(outputs, targets)
        return self.of_pairs(chosen, rejected).sum(), chosen.lengths.shape[0]


class DPOLoss(Loss):
    """Direct preference optimization: -log sigmoid(beta (log pi(w)/ref(w) - log pi(l)/ref(l))).

    Source: Rafailov et al. 2023, "Direct preference optimization", eq. 7. "hinge": max(0, 1 - beta margin) in its place (Zhao et
    al. 2023, SLiC-HF, with the margin of Liu et al. 2024, RSO). "ipo": (margin - 1 / (2 beta))^2 (Azar et al. 2023, "A general
    theoretical paradigm to understand learning from human preferences", eq. 17), with sums of log-probabilities, as the paper has.

    Inputs:
        ref_logprobs: log-probabilities of the reference model, one a token (or their sum, one number a sequence).

    Args:
        beta: how strongly the reference holds; of "ipo" the paper's tau.
        loss_type: "sigmoid", "hinge" or "ipo".
    """

    requires_pairs: ClassVar[bool] = True
    advice: ClassVar[Mapping[str, str]] = {"ref_logprobs": REFERENCE}

    @checks_keywords
    def __init__(self, beta: float = 0.1, loss_type: Kind = "sigmoid") -> None:
        check_number("beta", beta, above_zero=True)
        if loss_type not in get_args(Kind):
            raise ArgumentError(f"`loss_type={loss_type!r}`: use one of {listing(get_args(Kind))}."
                                f"{did_you_mean(str(loss_type), get_args(Kind))}")
        self.beta, self.loss_type = beta, loss_type

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride] - a loss names the inputs it takes
        self, outputs: "TokenOutputs", targets: torch.Tensor, *, ref_logprobs: torch.Tensor,
    ) -> "LossResult":
        """Return (the sum over pairs, how many there are)."""
        chosen, rejected = _answers(outputs, targets)
        reference = answer_logprobs(ref_logprobs.to(chosen.logprobs.dtype), targets != IGNORE_INDEX)
        ref_chosen, ref_rejected = split_pairs(reference)
        margin = (chosen.logprobs - ref_chosen) - (rejected.logprobs - ref_rejected)
        if self.loss_type == "sigmoid":
            losses = -logsigmoid(self.beta * margin)
        elif self.loss_type == "hinge":
            losses = (1 - self.beta * margin).clamp(min=0)
        else:
            losses = (margin - 1 / (2 * self.beta)) ** 2
        return losses.sum(), losses.shape[0]


class SimPOLoss(PairLoss):
    """Simple preference optimization: -log sigmoid(beta / |w| log pi(w) - beta / |l| log pi(l) - gamma). No reference model.

    Source: Meng et al. 2024, "SimPO", eq. 6.

    Args:
        beta: scale of the mean log-probabilities.
        gamma: by how much the chosen answer should be ahead.
    """

    @checks_keywords
    def __init__(self, beta: float = 2.0, gamma: float = 1.0) -> None:
        check_number("beta", beta, above_zero=True)
        check_number("gamma", gamma)
        self.beta, self.gamma = beta, gamma

    def of_pairs(self, chosen: Answers, rejected: Answers) -> torch.Tensor:
        """Return the loss of each pair, [P]."""
        return -logsigmoid(self.beta * (chosen.means - rejected.means) - self.gamma)


class ORPOLoss(PairLoss):
    """Odds-ratio preference optimization: NLL(w) - beta log sigmoid(log odds(w) - log odds(l)). No reference model.

    odds(y) = P / (1 - P) with P = pi(y)^(1/|y|), and NLL(w) is the mean over the tokens of the chosen answer.
    Source: Hong et al. 2024, "ORPO", eq. 4, 6 and 7.

    Args:
        beta: weight of the odds ratio, the paper's lambda.
    """

    @checks_keywords
    def __init__(self, beta: float = 0.1) -> None:
        check_number("beta", beta)
        self.beta = beta

    def of_pairs(self, chosen: Answers, rejected: Answers) -> torch.Tensor:
        """Return the loss of each pair, [P]."""
        return -chosen.means - self.beta * logsigmoid(_log_odds(chosen.means) - _log_odds(rejected.means))


class CPOLoss(PairLoss):
    """Contrastive preference optimization: -log sigmoid(beta log pi(w) - beta log pi(l)) + nll_weight NLL(w). No reference model.

    Source: Xu et al. 2024, "Contrastive preference optimization", sec. 3.2. The paper writes NLL(w) = -log pi(w); as in its
    authors' program it is the mean over the tokens of the chosen answer, else it would outweigh the first term by its length.

    Args:
        beta: scale of the log-probabilities.
        nll_weight: weight of the second term.
    """

    @checks_keywords
    def __init__(self, beta: float = 0.1, nll_weight: float = 1.0) -> None:
        check_number("beta", beta, above_zero=True)
        check_number("nll_weight", nll_weight)
        self.beta, self.nll_weight = beta, nll_weight

    def of_pairs(self, chosen: Answers, rejected: Answers) -> torch.Tensor:
        """Return the loss of each pair, [P]."""
        return -logsigmoid(self.beta * (chosen.logprobs - rejected.logprobs)) - self.nll_weight * chosen.means


def _answers(outputs: "TokenOutputs", targets: torch.Tensor) -> tuple[Answers, Answers]:
    mask = targets != IGNORE_INDEX
    if targets.shape[0] % 2 and bool(mask.any()):
        raise ModelError(f"A loss of preference pairs got {targets.shape[0]} rows, which are no pairs. Pass the two features of "
                         "each pair, the chosen one first.")
    logprobs, lengths = split_pairs(outputs.logprobs.sum(1)), split_pairs(mask.sum(1))
    return Answers(logprobs[0], lengths[0]), Answers(logprobs[1], lengths[1])


def _log_odds(means: torch.Tensor) -> torch.Tensor:
    return means - torch.log(-torch.expm1(means.clamp(max=-_LEAST_SURPRISE)))
