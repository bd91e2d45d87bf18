"""The interface of a loss.

Notation: B sequences, T positions, V vocabulary. Position t of `targets` is the token that position t predicts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from twinkle_core.processor.micro_batch import TokenOutputs

    LossResult = tuple[torch.Tensor, torch.Tensor | int]


class Loss(ABC):
    """Returns (sum, count); gradients are divided once, at the step, by the global count.

    Class attributes:
        requires_logits: set it to see `outputs.logits`; the memory-saving path is then off.
        requires_pairs: set it for a loss of preference pairs: rows alternate, chosen and rejected, and other features are refused.
        advice: input -> how to get it, for the error that says it is missing.
        logprob_gradient: d sum / d logprob where that is one number for all supervised tokens, as -1 in cross entropy. It saves
            the head a second pass; where a gradient turns out different, the head makes that pass.
    """

    requires_logits: ClassVar[bool] = False
    requires_pairs: ClassVar[bool] = False
    advice: ClassVar[Mapping[str, str]] = {}
    logprob_gradient: ClassVar[float | None] = None

    @abstractmethod
    def __call__(self, outputs: "TokenOutputs", targets: "torch.Tensor", **inputs: Any) -> "LossResult":
        """Return a sum over supervised tokens, a scalar with gradient, and by what it is divided: how many there are, or how many
        sequences or pairs if it counts these. Both are added over micro-batches and data ranks before the one division.

        Args:
            outputs: `logprobs` [B, T] of the targets, 0 where ignored; `logits` [B, T, V] if required, else None.
            targets: [B, T] token ids, -100 where ignored.
            inputs: what `forward_backward` got beside `inputs`, e.g. `advantages`, as tensors of shape [B] or [B, T].

        Raises: `ModelError` for an input it does not know.
        """


class FunctionLoss(Loss):
    """A function `(outputs, targets, **inputs) -> (sum, count)` as a loss. It sees logits if `function.requires_logits` is set."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.requires_logits = bool(getattr(function, "requires_logits", False))  # type: ignore[misc]

    def __call__(self, outputs: "TokenOutputs", targets: "torch.Tensor", **inputs: Any) -> "LossResult":
        """Call the function."""
        return self.function(outputs, targets, **inputs)


class LossForMetrics(Loss):
    """A loss that does not see those of its inputs that are for a metric only."""

    def __init__(self, loss: Loss, known: Collection[str]) -> None:
        self.loss, self.known = loss, known
        self.requires_logits, self.logprob_gradient = loss.requires_logits, loss.logprob_gradient  # type: ignore[misc]

    def __call__(self, outputs: "TokenOutputs", targets: "torch.Tensor", **inputs: Any) -> "LossResult":
        """Call the loss with what it takes."""
        return self.loss(outputs, targets, **{name: value for name, value in inputs.items() if name in self.known})
