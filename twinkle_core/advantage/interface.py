"""The interface of an advantage."""

from abc import ABC, abstractmethod
from collections.abc import Sequence


class Advantage(ABC):
    """Compares the answers to one prompt with each other."""

    @abstractmethod
    def __call__(self, rewards: Sequence[float], *, num_generations: int) -> list[float]:
        """Return one advantage a sequence, in order: `advantages=` of `forward_backward`.

        Args:
            rewards: one number a sequence; the answers to one prompt stand beside each other, as a sampler returns them.
            num_generations: answers a prompt, `SamplingParams.num_samples`.
        """
