"""The interface of a parallel strategy, one for each mesh axis."""

from abc import ABC, abstractmethod
from typing import Any

from twinkle_core.mesh import DeviceMesh


class ParallelStrategy(ABC):
    """Applies one axis of a mesh (`dp`, `fsdp`, `tp`, `pp`) to a model."""

    @abstractmethod
    def apply(self, model: Any, *, mesh: DeviceMesh) -> Any:
        """Return the model with the axis applied. Raises: `MeshError` with the sizes that would fit."""
