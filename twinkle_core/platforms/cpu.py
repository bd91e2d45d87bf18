"""The CPU as a device."""

import platform
import resource
import sys
from pathlib import Path

from twinkle_core.platforms.interface import Platform


class CPUPlatform(Platform):
    """One device: this machine's memory and processor. Needs no torch."""

    def count(self) -> int:
        """Return 1: there is always a CPU."""
        return 1

    def describe(self, index: int) -> str:
        """Return the processor's name where the system tells it."""
        try:
            for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        except OSError:  # not Linux
            pass
        return platform.processor() or platform.machine()

    def memory_bytes(self, index: int) -> tuple[int, int]:
        """Return (available, total) memory; (0, 0) where the system does not tell."""
        try:
            lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
        except OSError:  # not Linux
            return 0, 0
        kib = {key: int(value.split()[0]) for key, _, value in (line.partition(":") for line in lines)}
        return kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024

    def peak_memory_bytes(self, index: int) -> int:
        """Return the peak RSS of this process."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB

    @property
    def priority(self) -> int:
        """The last resort."""
        return 0

    @property
    def collective_backend(self) -> str:
        """gloo."""
        return "gloo"
