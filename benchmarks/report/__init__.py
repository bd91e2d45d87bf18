"""What every benchmark prints: one JSON object with its figures, and where and with what they were measured."""

import json
import os
import platform
import statistics
from collections.abc import Sequence
from importlib import metadata
from typing import Any


def report(benchmark: str, **figures: Any) -> None:
    """Print one JSON object: the benchmark's name, versions, CPUs, threads, and `figures`."""
    import torch

    versions = {name: metadata.version(name) for name in ("torch", "transformers", "twinkle-core")}
    print(json.dumps({"benchmark": benchmark, "python": platform.python_version(), **versions, "cpus": os.cpu_count(),
                      "threads": torch.get_num_threads(), **figures}))


def at_most(limit: float, values: Sequence[float], *, name: str = "ratio") -> dict[str, Any]:
    """Return the figures of `values`, called `name`, whose median must be at most `limit`."""
    return {**_spread(values, name), "limit": f"<= {limit:.4g}", "met": statistics.median(values) <= limit}


def at_least(limit: float, values: Sequence[float], *, name: str = "ratio") -> dict[str, Any]:
    """Return the figures of `values`, called `name`, whose median must be at least `limit`."""
    return {**_spread(values, name), "limit": f">= {limit:.4g}", "met": statistics.median(values) >= limit}


def _spread(values: Sequence[float], name: str) -> dict[str, Any]:
    return {name: round(statistics.median(values), 4), "smallest": round(min(values), 4), "largest": round(max(values), 4),
            "all": [round(value, 4) for value in values]}
