"""The interface of a device type, such as "cuda"."""

from abc import ABC, abstractmethod


class Platform(ABC):
    """A kind of device that torch can compute on. The registered name is torch's device type."""

    @abstractmethod
    def count(self) -> int:
        """Return how many devices of this kind the process sees; 0 where the driver or the build of torch lacks it."""

    @abstractmethod
    def describe(self, index: int) -> str:
        """Return the name of a device for people, e.g. "NVIDIA H200"."""

    @abstractmethod
    def memory_bytes(self, index: int) -> tuple[int, int]:
        """Return (free, total) memory of a device in bytes."""

    @abstractmethod
    def peak_memory_bytes(self, index: int) -> int:
        """Return the largest amount of memory this process has held on the device, in bytes; of a CPU, its peak RSS."""

    @property
    @abstractmethod
    def priority(self) -> int:
        """Which kind `device=None` prefers: the highest that has a device. The CPU's is 0."""

    @property
    @abstractmethod
    def collective_backend(self) -> str:
        """Name of the `torch.distributed` backend for this kind, e.g. "gloo"."""
