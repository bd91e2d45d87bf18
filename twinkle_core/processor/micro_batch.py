"""The tensors of one micro-batch, and what a model says about its tokens.

Notation: B sequences of the micro-batch, T positions of the longest; R rows of L positions that the model runs (R x L = B x T
without packing); N supervised positions; V vocabulary. This module only names torch's types: it imports nothing heavy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True)
class MicroBatch:
    """Some sequences, laid out in rows for the model.

    Attributes:
        input_ids_RL: token ids, padded on the right.
        position_ids_RL: positions that restart with each sequence of a row; None where a row holds one sequence.
        targets_BT: the token that each position predicts; -100 where it is not supervised, always at a sequence's end.
        source_N: where each supervised position lies in R x L, flattened; ascending.
        place_N: where it lies in B x T, flattened.
        targets_N: its target.
        lengths: tokens of each sequence.
        row_ids: which rows of the dataset the sequences are, None where a feature does not say.
        loss_inputs: what the loss gets beside outputs and targets: [B] or [B, T] tensors, or plain values.
    """

    input_ids_RL: "torch.Tensor"
    position_ids_RL: "torch.Tensor | None"
    targets_BT: "torch.Tensor"
    source_N: "torch.Tensor"
    place_N: "torch.Tensor"
    targets_N: "torch.Tensor"
    lengths: Sequence[int]
    row_ids: Sequence[int | None]
    loss_inputs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """The number of supervised tokens."""
        return self.targets_N.shape[0]


@dataclass(frozen=True, kw_only=True)
class Alternatives:
    """Tokens that could stand in a target's place, K at most.

    Attributes:
        ids: [B, T, K] token ids.
        logprobs: [B, T, K] their log-probabilities; -inf where there are fewer.
    """

    ids: "torch.Tensor"
    logprobs: "torch.Tensor"


@dataclass(kw_only=True)
class TokenOutputs:
    """What a loss or a metric sees. Position t speaks about `targets[:, t]`.

    Attributes:
        logprobs: [B, T] log-probability of the target, 0 where it is ignored.
        logits: [B, T, V], only for a loss that sets `requires_logits`.
        is_top: [B, T] whether the target is the likeliest token, False where it is ignored.
        top: the likeliest tokens, where the call asked for them.
    """

    logprobs: "torch.Tensor"
    logits: "torch.Tensor | None" = None
    is_top: "torch.Tensor | None" = None
    top: Alternatives | None = None

    def detached(self) -> "TokenOutputs":
        """Return the same without gradients."""
        return TokenOutputs(
            logprobs=self.logprobs.detach(), logits=None if self.logits is None else self.logits.detach(), is_top=self.is_top)
