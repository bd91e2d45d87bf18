"""The interface of a parallel strategy, one for each mesh axis."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from twinkle_core.mesh import DeviceMesh

if TYPE_CHECKING:
    from twinkle_core.parallel.placed import Placed


class ParallelStrategy(ABC):
    """What one axis of a mesh (`dp`, `fsdp`, `tp`, `pp`) does to a model."""

    @abstractmethod
    def check(self, config: Any, mesh: DeviceMesh) -> None:
        """Raise `MeshError`, with the sizes that would fit, unless a model of this configuration can be put on `mesh`.

        Called before any process waits for another.
        """

    @abstractmethod
    def apply(self, placed: "Placed") -> None:
        """Change `placed.module` in place, and note in `placed` what was done."""
