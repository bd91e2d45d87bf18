"""The interface of a metric."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from twinkle_core.processor.micro_batch import TokenOutputs


class Metric(ABC):
    """Accumulates over micro-batches and is asked for numbers by `calculate_metric`.

    Class attributes:
        inputs: names that `forward_backward` and `forward_only` then take beside `inputs=` for this metric, whatever the loss
            takes.
    """

    inputs: ClassVar[Collection[str]] = ()

    @abstractmethod
    def accumulate(self, outputs: "TokenOutputs", targets: "torch.Tensor", **inputs: Any) -> None:
        """Take in a micro-batch; shapes as `Loss.__call__`. Tensors carry no gradient. `inputs` holds what the loss got and what
        metrics take, of which any may be missing."""

    @abstractmethod
    def state(self) -> dict[str, float]:
        """Return sums that can be added over data ranks: the same keys in the same order on each of them."""

    @abstractmethod
    def compute(self, state: dict[str, float]) -> dict[str, float]:
        """Return the named numbers of an (added) state."""

    @abstractmethod
    def reset(self) -> None:
        """Forget what was accumulated."""
