"""GB/s of `sync_weights` on Ray / of bare Ray calls, and against saving and loading: SmolLM2-135M in fp32.

    python benchmarks/weight_sync.py [--pairs 5]

A trainer group and a sampler group of one rank each. Bare: one `ray.put` of the same bytes, one `ray.get` and one copy, in the
driver. Saving: `save` (which fsyncs) and loading it into the living sampler. The sides of a pair in turn. Prints one JSON object.
The machine should be quiet.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import at_least, report

import twinkle
from twinkle import DeviceGroup
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.model import TransformersModel
from twinkle.sampler import TorchSampler

SMOLLM2 = str(Path(__file__).resolve().parent.parent / ".assets" / "SmolLM2-135M-Instruct")


def main() -> None:
    import numpy as np
    import ray

    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    twinkle.initialize(mode="ray", groups=[DeviceGroup(name, ranks=1, device_type="cpu") for name in ("model", "sampler")])
    model = TransformersModel(SMOLLM2, dtype="float32", device="cpu", remote_group="model")
    sampler = TorchSampler(SMOLLM2, dtype="float32", device="cpu", remote_group="sampler")
    weights = CheckpointEngineManager(model=model, sampler=sampler)
    size_bytes = sum(4 * int(np.prod(shape)) for shape in model.plan_weights().shapes.values())
    source, target = np.random.default_rng(0).random(size_bytes // 8), np.empty(size_bytes // 8)

    def bare() -> None:
        np.copyto(target, ray.get(ray.put(source)))

    with tempfile.TemporaryDirectory() as folder:
        def through_disk() -> None:
            sampler.add_adapter_to_sampler("saved", model.save("w", folder, keep_last=1))

        sync_s, bare_s = time_pairs(weights.sync_weights, bare, pairs)
        again_s, disk_s = time_pairs(weights.sync_weights, through_disk, pairs)  # apart: writing back to disk slows what follows
    speeds = {name: round(size_bytes / 1e9 / statistics.median(seconds), 2) for name, seconds in (
        ("sync", sync_s), ("bare", bare_s), ("sync beside disk", again_s), ("disk", disk_s))}
    report("weight_sync", size_mb=round(size_bytes / 1e6), gb_per_s=speeds,
           sync_to_bare=at_least(0.5, [bare / sync for sync, bare in zip(sync_s, bare_s, strict=True)]),
           disk_to_sync=at_least(1.5, [disk / sync for sync, disk in zip(again_s, disk_s, strict=True)]))


def time_pairs(first: Callable[[], Any], second: Callable[[], Any], pairs: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each, after one of both to warm up; who begins alternates."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs + 1):
        for side in ((0, 1) if pair % 2 else (1, 0)):
            began = time.perf_counter()
            (first, second)[side]()
            if pair:
                seconds[side].append(time.perf_counter() - began)
    return seconds


if __name__ == "__main__":
    main()
