"""How often the target is the model's likeliest token."""

from typing import TYPE_CHECKING, Any

from twinkle_core.data_format import IGNORE_INDEX
from twinkle_core.metric.interface import Metric

if TYPE_CHECKING:
    import torch

    from twinkle_core.processor import TokenOutputs


class Accuracy(Metric):
    """`accuracy`: the share of supervised tokens that the model itself would have put first (teacher forcing), in [0, 1]."""

    def __init__(self) -> None:
        self._state = {"correct": 0.0, "tokens": 0.0}

    def accumulate(self, outputs: "TokenOutputs", targets: "torch.Tensor", **inputs: Any) -> None:
        """Count the tokens of a micro-batch."""
        if outputs.is_top is not None:
            self._state["correct"] += float(outputs.is_top.sum())
            self._state["tokens"] += float((targets != IGNORE_INDEX).sum())

    def state(self) -> dict[str, float]:
        """Return `correct` and `tokens`."""
        return dict(self._state)

    def compute(self, state: dict[str, float]) -> dict[str, float]:
        """Return `accuracy`; nothing where there was no token."""
        return {"accuracy": state["correct"] / state["tokens"]} if state["tokens"] else {}

    def reset(self) -> None:
        """Forget the counts."""
        self._state = {"correct": 0.0, "tokens": 0.0}
