"""GB/s of `sync_weights` on Ray / of bare Ray calls, and against saving and loading: SmolLM2-135M in fp32.

    python benchmarks/weight_sync.py [--pairs 5]

A trainer group and a sampler group of one rank each. Bare: one `ray.put` of the same bytes, one `ray.get` and one copy, in the
driver. Saving: `save` (which fsyncs) and loading it into the living sampler. Each side in turn. Prints one JSON object. The machine
should be quiet.
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

        sides: dict[str, Callable[[], Any]] = {"sync": weights.sync_weights, "bare": bare, "disk": through_disk}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for pair in range(pairs + 1):
            for name in list(sides) if pair % 2 else reversed(sides):
                began = time.perf_counter()
                sides[name]()
                if pair:  # the first warms up
                    seconds[name].append(time.perf_counter() - began)
    report("weight_sync", size_mb=round(size_bytes / 1e6), gb_per_s={
               name: round(size_bytes / 1e9 / statistics.median(values), 2) for name, values in seconds.items()},
           sync_to_bare=at_least(0.5, [b / a for a, b in zip(seconds["sync"], seconds["bare"], strict=True)]),
           disk_to_sync=at_least(1.5, [d / a for a, d in zip(seconds["sync"], seconds["disk"], strict=True)]))


if __name__ == "__main__":
    main()
