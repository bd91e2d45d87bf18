"""What mode ray costs: a call on a group, a training step on a group, memory over a thousand steps.

    python benchmarks/ray_dispatch.py [--only call|step|growth] [--pairs N]

* call: 64 KiB of rows to 2 ranks and back / the same in bare Ray calls on two actors, 300 of each in turn;
* step: `forward_backward` and `clip_grad_and_step` on a group of 2 / the same step under torchrun, whose two ranks live beside the
  group and take one step whenever they are told to, so that both sides alternate;
* growth: of the driver's own memory and of what is held in the object store, from step 100 to step 1,100.

Prints one JSON object. The machine should be quiet.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import at_most, report

import twinkle
from twinkle import DeviceGroup, DeviceMesh
from twinkle.model import TransformersModel
from twinkle_core.remote import RemoteComponent, remote_function

SMOLLM2 = Path(__file__).resolve().parent.parent / ".assets" / "SmolLM2-135M-Instruct"
CASES = {"tiny": ("tiny://qwen3", 1500, 32, 64, 1.10, 40), "smollm2": (str(SMOLLM2), 40_000, 4, 128, 1.03, 8)}
"""Name -> model, vocabulary drawn from, rows, length, limit, pairs."""
MIB = 2**20


class Echo(RemoteComponent):
    def __init__(self, *, remote_group: str | None = None) -> None:
        self.group = remote_group

    @remote_function(dispatch="slice", collect="flatten")
    def echo(self, rows: list[bytes]) -> list[bytes]:
        return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("call", "step", "growth"))
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--worker", choices=sorted(CASES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve_steps(options.worker)
        return
    twinkle.initialize(mode="ray", groups=[DeviceGroup("model", ranks=2, device_type="cpu")])
    figures: dict[str, Any] = {}
    if options.only in (None, "call"):
        figures["call_to_bare_ray"] = calls()
    if options.only in (None, "step"):
        for case in CASES:
            figures[f"step_to_torchrun_{case}"] = steps(case, options.pairs)
    if options.only in (None, "growth"):
        figures.update(growth())
    report("ray_dispatch", **figures)


def calls() -> dict[str, Any]:
    import ray

    @ray.remote(num_cpus=0)
    class Bare:
        def echo(self, rows: list[bytes]) -> list[bytes]:
            return rows

    rows = [os.urandom(1024) for _ in range(64)]
    component, actors = Echo(remote_group="model"), [Bare.remote() for _ in range(2)]

    def bare() -> list[bytes]:
        first, second = ray.get([actor.echo.remote(part) for actor, part in zip(actors, (rows[:32], rows[32:]), strict=True)])
        return first + second

    times: tuple[list[float], list[float]] = ([], [])
    for index in range(320):
        for which in ((0, 1) if index % 2 else (1, 0)):
            began = time.perf_counter()
            answer = (component.echo, lambda _: bare())[which](rows)
            if index >= 20:
                times[which].append(time.perf_counter() - began)
            if answer != rows:
                raise SystemExit("The rows did not come back as they were.")
    ours, theirs = map(statistics.median, times)
    return {"twinkle_ms": round(ours * 1e3, 3), "bare_ms": round(theirs * 1e3, 3), "calls": len(times[0]), **at_most(
        1.5, [ours / theirs])}


def batches(case: str, count: int) -> list[list[dict[str, Any]]]:
    import torch

    _, vocabulary, rows, length, _, _ = CASES[case]
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, vocabulary, (rows, length), generator=generator).tolist() for _ in range(count)]
    return [[{"input_ids": row, "labels": row} for row in batch] for batch in ids]


def stepper(case: str, mesh: DeviceMesh, **place: Any) -> Callable[[list[dict[str, Any]]], float]:
    model = TransformersModel(CASES[case][0], dtype="float32", device="cpu", device_mesh=mesh, **place)
    model.set_optimizer("AdamW", lr=1e-5)

    def step(batch: list[dict[str, Any]]) -> float:
        output = model.forward_backward(inputs=batch)
        model.clip_grad_and_step()
        return output["loss"]

    return step


def steps(case: str, pairs: int | None) -> dict[str, Any]:
    *_, limit, default_pairs = CASES[case]
    count = (pairs or default_pairs) + 2
    step = stepper(case, DeviceMesh.from_sizes(dp_size=2), remote_group="model")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("ask", "answer"):
            os.mkfifo(Path(folder) / name)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__,
                   "--worker", case]
        ranks = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", "BENCH_PIPES": folder}, stdout=sys.stderr)
        with (Path(folder) / "ask").open("w") as ask, (Path(folder) / "answer").open() as answer:
            def under_torchrun(index: int) -> tuple[float, float]:
                print(index, file=ask, flush=True)
                return tuple(json.loads(answer.readline()))

            ratios, seconds, worst = [], ([], []), 0.0
            for index, batch in enumerate(batches(case, count)):
                times, losses = [0.0, 0.0], [0.0, 0.0]
                for which in ((0, 1) if index % 2 else (1, 0)):
                    if which:
                        times[1], losses[1] = under_torchrun(index)
                        continue
                    began = time.perf_counter()
                    losses[0] = step(batch)
                    times[0] = time.perf_counter() - began
                worst = max(worst, abs(losses[0] - losses[1]) / losses[1])
                if index >= 2:  # the first two warm up
                    ratios.append(times[0] / times[1])
                    seconds[0].append(times[0])
                    seconds[1].append(times[1])
        ranks.wait()
    return {"ray_s": round(statistics.median(seconds[0]), 4), "torchrun_s": round(statistics.median(seconds[1]), 4),
            "pairs": len(ratios), "largest_loss_difference": worst, **at_most(limit, ratios)}


def serve_steps(case: str) -> None:
    """Take the step whose number is asked for, as one of two ranks under torchrun."""
    import torch.distributed as dist

    mesh = DeviceMesh.from_sizes(dp_size=2)
    twinkle.initialize(mode="local", global_device_mesh=mesh)
    step, all_batches = stepper(case, mesh), batches(case, 200)
    dist.barrier()
    rank, folder = int(os.environ["RANK"]), Path(os.environ["BENCH_PIPES"])
    half = len(all_batches[0]) // 2
    ask = (folder / "ask").open() if rank == 0 else None
    answer = (folder / "answer").open("w") if rank == 0 else None
    while True:
        asked = [ask.readline() if ask is not None else None]
        dist.broadcast_object_list(asked)
        if not asked[0]:
            break
        own = all_batches[int(asked[0])][rank * half:(rank + 1) * half]
        began = time.perf_counter()
        loss = step(own)
        seconds = time.perf_counter() - began
        if answer is not None:
            print(json.dumps([seconds, loss]), file=answer, flush=True)


def growth() -> dict[str, Any]:
    step = stepper("tiny", DeviceMesh.from_sizes(dp_size=2), remote_group="model")
    batch = [row | {"input_ids": row["input_ids"][:16], "labels": row["labels"][:16]} for row in batches("tiny", 1)[0][:4]]
    for index in range(1100):
        if index == 100:
            before = own_bytes(), stored_bytes()
        step(batch)
    after = own_bytes(), stored_bytes()
    return {f"growth_of_{name}_mib": at_most(20, [(end - begin) / MIB], name="mib") for name, begin, end in zip(
        ("driver_memory", "object_store"), before, after, strict=True)}


def own_bytes() -> int:
    """Return the driver's anonymous memory."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/self/status has no line RssAnon; this measurement needs Linux.")


def stored_bytes() -> float:
    """Return the bytes in the object store."""
    import ray

    whole, free = (resources.get("object_store_memory", 0.0) for resources in (ray.cluster_resources(), ray.available_resources()))
    return whole - free


if __name__ == "__main__":
    main()
