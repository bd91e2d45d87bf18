"""Whole tensors of a model that is spread over ranks, one after the other, for the first rank to write.

Every rank goes through the same tensors in the same order, so nobody but the first holds more than its own part and what is on its
way. A rank that has nothing to write, or has failed, drains the stream.
"""

from typing import TYPE_CHECKING

import torch

from twinkle_core.checkpoint.tensor_file import Stream
from twinkle_core.model.adapter import AdapterState
from twinkle_core.model.sending import Sending
from twinkle_core.model.training_state import SEPARATOR
from twinkle_core.model.whole import WholeModel, placed_of
from twinkle_core.parallel.gathering import whole_tensor
from twinkle_core.weight_sync.interface import BUCKET_BYTES

if TYPE_CHECKING:
    from twinkle_core.model.transformers_model import TransformersModel


class WholeStream:
    """The weights of a model or an adapter, then its optimizer state.

    Attributes:
        weights: (name, tensor) on the first rank: plain names of the model, or peft's file names of an adapter.
        moments: (key in the file of the optimizer, tensor) of what has its parameter's shape.
    """

    def __init__(self, model: "TransformersModel", state: AdapterState, whole: WholeModel, *, with_optimizer: bool) -> None:
        self._placed, self._state = placed_of(state), state
        self._is_first = self._placed.ranks.rank == 0
        sending = Sending(model, state, merge=False, bucket_bytes=BUCKET_BYTES)
        self.weights: Stream = self._weights(sending)
        self.moments: Stream = self._moments(_cut_keys(whole.chosen) if with_optimizer else [])

    def drain(self) -> None:
        """Go through what is left with the other ranks."""
        for _ in self.weights:
            pass
        for _ in self.moments:
            pass

    def _weights(self, sending: Sending) -> Stream:
        for index in range(len(sending.plan.buckets)):
            yield from sending.read(index).tensors.items()

    def _moments(self, keys: list[tuple[str, str]]) -> Stream:
        optimizer, ranks = self._state.optimizer, self._placed.ranks
        for name, part in keys:
            parameter = self._state.parameters.get(name)
            own: dict[str, torch.Tensor] = {}
            if parameter is not None and optimizer is not None:
                own[f"{name}{SEPARATOR}{part}"] = whole_tensor(self._placed, name, optimizer.state[parameter][part])
            yield from ranks.union_of_stages(own, keep=self._is_first).items()


def _cut_keys(chosen: AdapterState) -> list[tuple[str, str]]:
    """Return (parameter, part of its optimizer state) of what an outline has without memory."""
    if chosen.optimizer is None:
        return []
    return [(name, part) for name, parameter in chosen.parameters.items()
            for part, value in chosen.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and value.device.type == "meta"]
