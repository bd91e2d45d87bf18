"""Distillation: a student learns a teacher's distributions, on texts of the data or on answers that it sampled itself (GKD).

The teacher speaks through the likeliest tokens in each place with their log-probabilities, which any mode can carry: what
`forward_only(top_logprobs=k)` of the teacher returns. All other tokens count as one more outcome, on both sides. With k = the whole
vocabulary the divergence is exact, with fewer it is a lower bound (merging outcomes never adds to a divergence).

Notation: B sequences, T positions, V vocabulary, N supervised positions, K alternatives; P teacher, Q student.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from twinkle_core.data_format import IGNORE_INDEX
from twinkle_core.errors import ArgumentError, DataError, ModelError, checks_keywords
from twinkle_core.loss.interface import Loss
from twinkle_core.processor import Alternatives

if TYPE_CHECKING:
    from twinkle_core.loss.interface import LossResult
    from twinkle_core.processor import TokenOutputs

_NEVER = -1e4
"""Log-probability of what cannot be: finite, so that 0 * log 0 is 0 and has no gradient."""
_LEAST_REST = 1e-8
"""Probability of the rest where rounding leaves none, though there are tokens in it."""


class GKDLoss(Loss):
    """Generalised Jensen-Shannon divergence of teacher and student, a mean over tokens.

    JSD = beta KL(P || M) + (1 - beta) KL(Q || M) with M = beta P + (1 - beta) Q. Divided by beta or 1 - beta it tends to KL(P || Q)
    as beta goes to 0 and to KL(Q || P) as it goes to 1, so that is what 0 and 1 mean here. Source: Agarwal et al. 2024, "On-policy
    distillation of language models" (GKD), sec. 2 and 3. Training on answers that the student has just sampled is its on-policy
    case (lambda = 1).

    The student's logits are needed whole, so the memory-saving path is off; under tp they are gathered.

    Inputs:
        teacher_top_logprobs: for each sequence one dict a token, token id -> log-probability.

    Args:
        beta: in [0, 1].
    """

    requires_logits: ClassVar[bool] = True
    advice: ClassVar[Mapping[str, str]] = {
        "teacher_top_logprobs": "`teacher_top_logprobs=teacher.forward_only(inputs=batch, top_logprobs=64)[\"top_logprobs\"]`"}

    @checks_keywords
    def __init__(self, beta: float = 0.5) -> None:
        if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta <= 1:
            raise ArgumentError(f"`beta={beta!r}`: use a number in [0, 1]. 0 is KL(teacher || student), 1 is KL(student || "
                                "teacher).")
        self.beta = float(beta)

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride] - a loss names the inputs it takes
        self, outputs: "TokenOutputs", targets: torch.Tensor, *, teacher_top_logprobs: Any,
    ) -> "LossResult":
        """Return (the sum over supervised tokens, their number)."""
        if outputs.logits is None:
            raise ModelError("`GKDLoss` needs `outputs.logits`. Leave its `requires_logits` as it is.")
        mask = targets != IGNORE_INDEX
        logits_nv = outputs.logits[mask]
        if not logits_nv.shape[0]:  # a row with which a rank waits, to which no teacher speaks
            return outputs.logits.sum() * 0.0, 0
        if not isinstance(teacher_top_logprobs, Alternatives):
            raise DataError(f"`teacher_top_logprobs` holds no dicts of alternatives. Pass {self.advice['teacher_top_logprobs']}.")
        log_p, log_q = _outcomes(logits_nv, teacher_top_logprobs.ids[mask], teacher_top_logprobs.logprobs[mask])
        return self._divergence(log_p, log_q).sum(), mask.sum()

    def _divergence(self, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        if self.beta == 0:
            return log_p.exp() * (log_p - log_q)
        if self.beta == 1:
            return log_q.exp() * (log_q - log_p)
        log_m = torch.logaddexp(log_p + math.log(self.beta), log_q + math.log1p(-self.beta))
        return self.beta * log_p.exp() * (log_p - log_m) + (1 - self.beta) * log_q.exp() * (log_q - log_m)


def _outcomes(logits_nv: torch.Tensor, ids_nk: torch.Tensor, logprobs_nk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log P and log Q of the alternatives and of the rest, [N, K + 1]."""
    wide = logits_nv if logits_nv.dtype == torch.float64 else logits_nv.float()
    is_there = logprobs_nk > -math.inf
    count_n = is_there.sum(1)
    if not bool(count_n.all()):
        raise DataError("`teacher_top_logprobs` has no alternative at a token that the student is trained on. Score the teacher on "
                        "the same features, with the same labels.")
    if bool((ids_nk >= wide.shape[1]).any()):
        raise DataError(f"`teacher_top_logprobs` has the token {int(ids_nk.max())}, the student has {wide.shape[1]} tokens. "
                        "Teacher and student must share a tokenizer.")
    first = is_there.long().argmax(1, keepdim=True)
    ids_nk = torch.where(is_there, ids_nk, ids_nk.gather(1, first))  # what is missing repeats one that is there
    log_softmax_nv = torch.log_softmax(wide, -1)
    log_q = torch.where(is_there, log_softmax_nv.gather(1, ids_nk), _NEVER)
    log_p = torch.where(is_there, logprobs_nk.to(wide.dtype), _NEVER)
    has_rest = (count_n < wide.shape[1])[:, None]
    rest_q = torch.logsumexp(log_softmax_nv.scatter(1, ids_nk, _NEVER), 1, keepdim=True)
    rest_p = torch.log((1 - log_p.exp().sum(1, keepdim=True)).clamp(min=_LEAST_REST))
    return (torch.cat([log_p, torch.where(has_rest, rest_p, _NEVER)], 1),
            torch.cat([log_q, torch.where(has_rest, rest_q, _NEVER)], 1))
