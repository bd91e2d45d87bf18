"""The interface of a metric."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from twinkle_core.processor.micro_batch import TokenOutputs


class Metric(ABC):
    """Accumulates over micro-batches and is asked for numbers by `calculate_metric`."""

    @abstractmethod
    def accumulate(self, outputs: "TokenOutputs", targets: "torch.Tensor", **inputs: Any) -> None:
        """Take in a micro-batch; shapes as `Loss.__call__`. Tensors carry no gradient."""

    @abstractmethod
    def state(self) -> dict[str, float]:
        """Return sums that can be added over data ranks."""

    @abstractmethod
    def compute(self, state: dict[str, float]) -> dict[str, float]:
        """Return the named numbers of an (added) state."""

    @abstractmethod
    def reset(self) -> None:
        """Forget what was accumulated."""
