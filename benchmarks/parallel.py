"""What parallelism costs: memory a rank, bytes a rank communicates, calls under accumulation, step time, memory while loading.

    python benchmarks/parallel.py [--only held|bytes|calls|time|loading] [--pairs N]

Each measurement runs on processes of this machine (gloo, one thread each); a figure is that of the worst rank. Bytes are counted by
a process group that hands everything on to gloo: the payload is what a rank gives (all-reduce, reduce-scatter and send: the tensor;
all-gather: its own part; broadcast: the tensor on the rank that has it), not what it gets. The formulas are those of
docs/parallelism.md. Prints one JSON object. The machine should be quiet.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from report import at_most, report
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import twinkle
from twinkle_core.mesh import DeviceMesh
from twinkle_core.model.transformers_model import TransformersModel
from twinkle_core.parallel.gradients import local

SMOLLM2 = Path(__file__).resolve().parent.parent / ".assets" / "SmolLM2-135M-Instruct"
FP32 = 4  # bytes
D, LAYERS, VOCABULARY, ROWS, LENGTH, MICRO_BATCHES = 64, 4, 512, 4, 32, 2
LR = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("held", "bytes", "calls", "time", "loading"))
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        WORKERS[options.worker](options.pairs)
        return
    figures: dict[str, Any] = {}
    chosen = [options.only] if options.only else ["held", "bytes", "calls", "time", "loading"]
    for name in chosen:
        figures.update(MEASUREMENTS[name](options.pairs))
    report("parallel", **figures)


def run_ranks(worker: str, ranks: int, *, pairs: int = 0, model: Path = SMOLLM2) -> list[Any]:
    """Run a worker of this file on every rank and return what each has written."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--standalone", __file__,
                   "--worker", worker, "--pairs", str(pairs)]
        subprocess.run(command, check=True, stdout=sys.stderr,
                       env={**os.environ, "OMP_NUM_THREADS": "1", "BENCH_OUT": folder, "BENCH_MODEL": str(model)})
        return [json.loads((Path(folder) / f"{rank}.json").read_text("utf-8")) for rank in range(ranks)]


def hand_in(value: Any) -> None:
    """Write what this rank has measured."""
    (Path(os.environ["BENCH_OUT"]) / f"{os.environ['RANK']}.json").write_text(json.dumps(value), "utf-8")


def batches(vocabulary: int, rows: int, length: int, count: int) -> Iterator[list[dict[str, Any]]]:
    """Yield this rank's part of global batches, every token of which is trained on."""
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    for _ in range(count):
        ids = torch.randint(0, vocabulary, (rows, length), generator=generator).tolist()
        yield [{"input_ids": row, "labels": row} for row in ids]


def own_model(mesh: DeviceMesh | None, **options: Any) -> TransformersModel:
    twinkle.initialize(mode="local", global_device_mesh=mesh)
    model = TransformersModel(os.environ["BENCH_MODEL"], dtype="float32", device="cpu", **options)
    model.set_optimizer("AdamW", lr=LR)
    return model


# Memory ---------------------------------------------------------------------------------------------------------------------


def held(pairs: int) -> dict[str, Any]:
    alone, = run_ranks("held1", 1)
    worst = max(run_ranks("held4", 4))
    return {"held_bytes": {"fsdp 4": worst, "one device": alone}, "held_at_fsdp_4_to_one_device": at_most(0.27, [worst / alone])}


def work_held(mesh: DeviceMesh) -> None:
    model = own_model(mesh)
    for index, batch in enumerate(batches(40_000, 1, 32, 2)):
        model.forward_backward(inputs=batch)
        if index == 0:
            model.clip_grad_and_step()
    state = model.state()
    tensors = {id(tensor): local(tensor) for tensor in model.module.parameters()}
    for parameter in state.parameters.values():
        tensors[id(parameter.grad)] = local(parameter.grad)
        for moment in state.optimizer.state[parameter].values():
            tensors[id(moment)] = local(moment)
    hand_in(sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))


def loading(pairs: int) -> dict[str, Any]:
    ranks = run_ranks("loading", 4)
    return {"loading_bytes": ranks, "growth_while_loading_to_shard": at_most(
        1.5, [max(rank["growth"] / rank["shard"] for rank in ranks)])}


def work_loading(pairs: int) -> None:
    twinkle.initialize(mode="local", global_device_mesh=DeviceMesh.from_sizes(fsdp_size=4))
    dist.init_process_group("gloo")
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                                 num_attention_heads=1))  # what importing and building first costs
    peak, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            peak[0] = max(peak[0], anonymous_bytes())
            time.sleep(0.001)

    dist.barrier()
    before = anonymous_bytes()
    watcher = threading.Thread(target=watch)
    watcher.start()
    model = TransformersModel(os.environ["BENCH_MODEL"], dtype="float32", device="cpu")
    model.ready("")
    stop.set()
    watcher.join()
    shard = {id(parameter): local(parameter) for parameter in model.module.parameters()}
    hand_in({"growth": peak[0] - before, "shard": sum(tensor.numel() * tensor.element_size() for tensor in shard.values())})


def anonymous_bytes() -> int:
    """Return the resident memory that is no mapped file."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/self/status has no line RssAnon; this measurement needs Linux.")


# Communication --------------------------------------------------------------------------------------------------------------


class CountingGroup(dist.ProcessGroup):
    """Hands everything on to gloo and counts what this rank gives."""

    calls: ClassVar[Counter[str]] = Counter()
    payload: ClassVar[Counter[str]] = Counter()

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        # a group has its name from a backend
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)

    def _count(self, what: str, tensors: Any) -> None:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        self.calls[what] += 1
        self.payload[what] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        self._count("all_reduce", tensors)
        return self._gloo.allreduce(tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        self._count("all_gather", inputs)
        return self._gloo.allgather(outputs, inputs, opts)

    def all_gather_single(self, output: Any, input: Any, opts: Any) -> Any:
        self._count("all_gather", input)
        return self._gloo._allgather_base(output, input, opts)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any) -> Any:
        self._count("reduce_scatter", input)
        return self._gloo._reduce_scatter_base(output, input, opts)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        if opts.rootRank == self.rank():
            self._count("broadcast", tensors)
        return self._gloo.broadcast(tensors, opts)

    def send(self, tensors: Any, destination: int, tag: int) -> Any:
        self._count("send", tensors)
        return self._gloo.send(tensors, destination, tag)

    def recv(self, tensors: Any, source: int, tag: int) -> Any:
        return self._gloo.recv(tensors, source, tag)

    def barrier(self, opts: Any) -> Any:
        return self._gloo.barrier(opts)


def start_counting() -> None:
    dist.Backend.register_backend("counting", CountingGroup, devices=["cpu"])
    dist.init_process_group("counting")


AXES = ("dp", "fsdp", "tp", "pp")


def count_bytes(pairs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=D, intermediate_size=3 * D, num_hidden_layers=LAYERS, num_attention_heads=8,
            num_key_value_heads=4, head_dim=8, tie_word_embeddings=False)).save_pretrained(folder)
        found = {axis: run_ranks(f"bytes_{axis}", 2, model=Path(folder)) for axis in AXES}
    return {"payload": found, **{f"payload_{axis}_to_formula": at_most(
        1.05, [max(exact(rank["bytes"] / rank["formula"], axis) for rank in ranks)]) for axis, ranks in found.items()}}


def exact(ratio: float, axis: str) -> float:
    """Return the ratio, unless it is so small that the group cannot have seen every collective."""
    if ratio < 0.99:
        raise SystemExit(f"{axis}: only {ratio:.2f} of what the formula says was counted. The counter misses a collective.")
    return ratio


def work_bytes(axis: str) -> None:
    start_counting()
    model = own_model(DeviceMesh.from_sizes(**{f"{axis}_size": 2}), gradient_accumulation_steps=1)
    model.set_processor(micro_batch_size=ROWS)
    for index, batch in enumerate(batches(VOCABULARY, ROWS * MICRO_BATCHES, LENGTH, 4)):
        if index == 3:  # the first steps find out about buckets, buffers and shapes
            CountingGroup.calls.clear()
            CountingGroup.payload.clear()
        model.forward_backward(inputs=batch)
        model.clip_grad_and_step()
    hand_in({"calls": CountingGroup.calls, "payload": CountingGroup.payload, "bytes": sum(CountingGroup.payload.values()),
             "formula": formula(axis, int(os.environ["RANK"]))})


def formula(axis: str, rank: int) -> int:
    """Return the bytes of a step on two ranks, as docs/parallelism.md has them."""
    layer = 2 * D * D + 2 * D * (D // 2) + 3 * D * 3 * D + 2 * D
    parameters = LAYERS * layer + 2 * VOCABULARY * D + D
    tokens, supervised = ROWS * LENGTH, ROWS * (LENGTH - 1)
    if axis == "dp":
        return FP32 * parameters
    if axis == "fsdp":
        return FP32 * (MICRO_BATCHES * (parameters + LAYERS * layer) // 2 + parameters)
    if axis == "tp":
        return FP32 * MICRO_BATCHES * (4 * LAYERS * tokens * D + tokens * D + supervised * (D + 3))
    logprobs = MICRO_BATCHES * tokens if rank == 1 else 0
    return FP32 * (MICRO_BATCHES * tokens * D + logprobs)


def count_calls(pairs: int) -> dict[str, Any]:
    worst = max(rank["4"] / rank["1"] for rank in run_ranks("calls", 2))
    return {"all_reduce_calls_at_accumulation_4_to_1": at_most(1.0, [worst])}


def work_calls(pairs: int) -> None:
    start_counting()
    CountingGroup.calls.clear()
    twinkle.initialize(mode="local", global_device_mesh=DeviceMesh.from_sizes(dp_size=2))
    counts = {}
    for steps in (1, 4):
        model = TransformersModel("tiny://qwen3", device="cpu", gradient_accumulation_steps=steps)
        for index, batch in enumerate(batches(256, 2, 16, 4 * steps)):
            if index == 3 * steps:
                before = large_reductions()
            model.forward_backward(inputs=batch)
            model.clip_grad_and_step()
        counts[str(steps)] = large_reductions() - before
    hand_in(counts)


def large_reductions() -> int:
    return CountingGroup.calls["all_reduce"]


# Time -----------------------------------------------------------------------------------------------------------------------


def step_time(pairs: int) -> dict[str, Any]:
    figures = {}
    for kind in ("ddp", "fully_shard"):
        ranks = run_ranks(f"time_{kind}", 2, pairs=pairs)
        figures[f"step_s_{kind}"] = {side: round(statistics.median(ranks[0][side]), 3) for side in ("twinkle", "hand_written")}
        figures[f"largest_loss_difference_{kind}"] = max(rank["difference"] for rank in ranks)
        figures[f"step_to_hand_written_{kind}"] = at_most(
            1.05, [a / b for a, b in zip(ranks[0]["twinkle"], ranks[0]["hand_written"], strict=True)])
    return figures


def work_time(kind: str, pairs: int) -> None:
    axis = {"ddp": "dp_size", "fully_shard": "fsdp_size"}[kind]
    ours, theirs = twinkle_step(DeviceMesh.from_sizes(**{axis: 2})), hand_written_step(kind)
    seconds: tuple[list[float], list[float]] = ([], [])
    difference = 0.0
    for index, batch in enumerate(batches(40_000, 2, 128, pairs + 2)):
        losses, times = [0.0, 0.0], [0.0, 0.0]
        for which in ((0, 1) if index % 2 else (1, 0)):
            dist.barrier()
            began = time.perf_counter()
            losses[which] = (ours, theirs)[which](batch)
            dist.barrier()
            times[which] = time.perf_counter() - began
        difference = max(difference, abs(losses[0] - losses[1]) / losses[1])
        if index >= 2:  # the first two warm up
            seconds[0].append(times[0])
            seconds[1].append(times[1])
    hand_in({"twinkle": seconds[0], "hand_written": seconds[1], "difference": difference})


def twinkle_step(mesh: DeviceMesh) -> Callable[[list[dict[str, Any]]], float]:
    model = own_model(mesh)

    def step(batch: list[dict[str, Any]]) -> float:
        output = model.forward_backward(inputs=batch)
        model.clip_grad_and_step()
        return output["loss"]

    return step


def hand_written_step(kind: str) -> Callable[[list[dict[str, Any]]], float]:
    model: Any = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).train()
    if kind == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)

    def step(batch: list[dict[str, Any]]) -> float:
        input_ids = torch.tensor([row["input_ids"] for row in batch])
        loss = model(input_ids=input_ids, labels=torch.tensor([row["labels"] for row in batch]), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)  # Twinkle gives the mean over the ranks too
        return mean.item() / dist.get_world_size()

    return step


MEASUREMENTS = {"held": held, "bytes": count_bytes, "calls": count_calls, "time": step_time, "loading": loading}
WORKERS: dict[str, Callable[[int], None]] = {
    "held1": lambda pairs: work_held(DeviceMesh.from_sizes(dp_size=1)),
    "held4": lambda pairs: work_held(DeviceMesh.from_sizes(fsdp_size=4)),
    "loading": work_loading,
    "calls": work_calls,
    "time_ddp": lambda pairs: work_time("ddp", pairs),
    "time_fully_shard": lambda pairs: work_time("fully_shard", pairs),
    **{f"bytes_{axis}": lambda pairs, axis=axis: work_bytes(axis) for axis in AXES},
}

if __name__ == "__main__":
    main()
