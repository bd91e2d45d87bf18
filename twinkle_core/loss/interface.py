"""The interface of a loss.

Notation: B sequences, T positions, V vocabulary. Position t of `targets` is the token that position t predicts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from twinkle_core.processor.micro_batch import TokenOutputs

    LossResult = tuple[torch.Tensor, torch.Tensor | int]


class Loss(ABC):
    """Returns (sum, count); gradients are divided once, at the step, by the global count.

    Class attributes:
        requires_logits: set it to see `outputs.logits`; the memory-saving path is then off.
        logprob_gradient: d sum / d logprob where that is one number for all supervised tokens, as -1 in cross entropy. It saves
            the head a second pass; where a gradient turns out different, the head makes that pass.
    """

    requires_logits: ClassVar[bool] = False
    logprob_gradient: ClassVar[float | None] = None

    @abstractmethod
    def __call__(self, outputs: "TokenOutputs", targets: "torch.Tensor", **inputs: Any) -> "LossResult":
        """Return the sum over supervised tokens, a scalar with gradient, and how many there are.

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
