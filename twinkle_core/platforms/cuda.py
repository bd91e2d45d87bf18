"""NVIDIA GPUs through torch."""

from twinkle_core.platforms.interface import Platform


class CUDAPlatform(Platform):
    """The GPUs that torch sees; none where torch is not installed or was built without CUDA."""

    def count(self) -> int:
        """Return the number of visible GPUs."""
        try:
            import torch
        except ImportError:
            return 0
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def describe(self, index: int) -> str:
        """Return the name of a GPU."""
        import torch

        return torch.cuda.get_device_name(index)

    def memory_bytes(self, index: int) -> tuple[int, int]:
        """Return (free, total) memory of a GPU."""
        import torch

        return torch.cuda.mem_get_info(index)

    def peak_memory_bytes(self, index: int) -> int:
        """Return the most that torch's allocator has held."""
        import torch

        return torch.cuda.max_memory_allocated(index)

    @property
    def priority(self) -> int:
        """Before the CPU."""
        return 100

    @property
    def collective_backend(self) -> str:
        """nccl."""
        return "nccl"
