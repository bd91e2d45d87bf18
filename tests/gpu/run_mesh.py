"""On a machine with a GPU: a mesh of one rank under nccl, against a hand-written loop; prints one JSON object.

    python tests/gpu/run_mesh.py      # in an environment with `twinkle-core[train]` and `twinkle-qwen`; needs no network

Each side runs under `twinkle launch --mode torchrun --nproc-per-node 1`: Twinkle's loop with `--mesh fsdp=1`, and a loop on the
same batches with nccl, `fully_shard` over a mesh of one rank and AdamW. Exit status 0 only if both give the same losses on the
device. Twinkle starts no process group for one rank, so what it sends over nccl stays untested here: that needs two GPUs.
`--device cpu` runs the same with gloo, to try this script itself.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

MODEL, ROWS, BATCH, WARM = "tiny://qwen3", 64, 4, 3
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def batches(model_id: str, steps: int) -> list[Any]:
    """Return the same encoded batches on both sides."""
    from twinkle.dataset import Dataset, DatasetMeta

    data = Dataset(DatasetMeta("tiny://self-cognition", data_slice=range(ROWS)))
    data.set_template("Qwen3Template", model_id=model_id)
    data.encode()
    return [[data[(step * BATCH + row) % ROWS] for row in range(BATCH)] for step in range(steps)]


def with_twinkle(device: str, steps: int) -> dict[str, Any]:
    """Train through Twinkle in this process."""
    import twinkle
    from twinkle.model import TransformersModel

    twinkle.initialize(mode="local")
    model = TransformersModel(MODEL, device=device)
    model.set_optimizer("AdamW", lr=1e-3)
    losses, ends = [], []
    for batch in batches(MODEL, steps):
        losses.append(model.forward_backward(inputs=batch)["loss"])
        model.clip_grad_and_step()
        ends.append(time.perf_counter())
    return {"losses": losses, "ends": ends, "device": str(next(iter(model.module.parameters())).device)}


def by_hand(device: str, steps: int) -> dict[str, Any]:
    """Train with torch alone on the same rows, padded as Twinkle pads them."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    from twinkle_core.hub import resolve_model

    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group(BACKENDS[device], device_id=place if device == "cuda" else None)
    module: Any = AutoModelForCausalLM.from_pretrained(str(resolve_model(MODEL)), dtype=torch.float32)
    module.to(place)
    mesh = dist.device_mesh.init_device_mesh(device, (1,))
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01)
    losses, ends = [], []
    for batch in batches(MODEL, steps):
        length = max(len(row["input_ids"]) for row in batch)
        ids = torch.tensor([row["input_ids"] + [0] * (length - len(row["input_ids"])) for row in batch], device=place)
        labels = torch.tensor([row["labels"] + [-100] * (length - len(row["labels"])) for row in batch], device=place)
        mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in batch], device=place)
        logits = module(input_ids=ids, attention_mask=mask).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        ends.append(time.perf_counter())
    dist.destroy_process_group()
    return {"losses": losses, "ends": ends, "device": str(place)}


def measure(side: str, device: str, steps: int, folder: Path) -> dict[str, Any]:
    """Run one side under the launcher and return its losses, median step time and device."""
    twinkle = Path(sys.executable).with_name("twinkle")
    command = [str(twinkle), "launch", "--mode", "torchrun", "--nproc-per-node", "1", "--mesh", "fsdp=1", __file__,
               "--device", device, "--steps", str(steps), "--side", side]
    environ = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environ, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{side} ended with status {done.returncode}:\n{done.stderr}")
    result = json.loads(done.stdout.splitlines()[-1])
    ends = result.pop("ends")[WARM:]
    return {**result, "step_ms": 1000 * median(end - begin for begin, end in pairwise(ends))}


def main() -> int:
    """Run both sides and compare them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=sorted(BACKENDS), default="cuda")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--side", choices=("twinkle", "hand"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps((with_twinkle if options.side == "twinkle" else by_hand)(options.device, options.steps)))
        return 0
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("This script needs a CUDA device; torch.cuda.is_available() is False. Try it with: --device cpu", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = (measure(side, options.device, options.steps, Path(folder)) for side in ("twinkle", "hand"))
    differences = [abs(own - other) / other for own, other in zip(ours.pop("losses"), theirs.pop("losses"), strict=True)]
    is_right = max(differences) < 1e-3 and all(side["device"].startswith(options.device) for side in (ours, theirs))
    print(json.dumps({"torch": torch.__version__, "twinkle": ours, "hand": theirs, "ratio": ours["step_ms"] / theirs["step_ms"],
                      "largest_relative_difference_of_loss": max(differences), "ok": is_right}))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
