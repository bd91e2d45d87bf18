"""Token-mean cross entropy, the default loss."""

from typing import TYPE_CHECKING, ClassVar

from twinkle_core.data_format import IGNORE_INDEX
from twinkle_core.loss.interface import Loss

if TYPE_CHECKING:
    import torch

    from twinkle_core.loss.interface import LossResult
    from twinkle_core.processor import TokenOutputs


class CrossEntropyLoss(Loss):
    """Minus the log-probability of every supervised token; each token counts 1."""

    logprob_gradient: ClassVar[float | None] = -1.0

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride] - a loss names the inputs it takes: here none
        self, outputs: "TokenOutputs", targets: "torch.Tensor",
    ) -> "LossResult":
        """Return (minus the sum of the log-probabilities, the number of supervised tokens)."""
        return -outputs.logprobs.sum(), (targets != IGNORE_INDEX).sum()
