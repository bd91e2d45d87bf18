"""On a machine with a GPU: the contract program and the quickstart in bf16 on cuda; prints one JSON object.

    python tests/gpu/run_gpu.py      # in an environment with `twinkle-core[train]` and `twinkle-qwen`; needs no network

Each program runs as it stands, in a process of its own that notes the loss and the time of every step, where the model's weights
are, and the most memory it held; the contract program with the stand-in ModelScope cache. Exit status 0 only if both trained on the
device. `--device cpu` runs the same without a GPU, to try this script itself.
"""

import argparse
import ast
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SINGLE = ROOT / "tests" / "contract" / "single.py"
QUICKSTART = ROOT / "examples" / "quickstart.py"
PRECISIONS = {"cuda": "bf16", "cpu": None}


class Watch:
    """Notes what `TransformersModel` does in this process, from now on."""

    def __init__(self) -> None:
        from twinkle.model import TransformersModel

        self.losses: list[float] = []
        self.ends: list[float] = []
        self.devices: set[str] = set()
        forward_backward, step = TransformersModel.forward_backward, TransformersModel.clip_grad_and_step

        def watched_forward_backward(model: Any, *args: Any, **kwargs: Any) -> Any:
            output = forward_backward(model, *args, **kwargs)
            self.losses.append(output["loss"])
            return output

        def watched_step(model: Any, *args: Any, **kwargs: Any) -> Any:
            has_stepped = step(model, *args, **kwargs)
            self.devices |= {parameter.device.type for parameter in model.module.parameters()}
            self.ends.append(time.perf_counter())
            return has_stepped

        TransformersModel.forward_backward = watched_forward_backward
        TransformersModel.clip_grad_and_step = watched_step

    def figures(self) -> dict[str, Any]:
        """Return losses of the first and last step, the median time from step to step, and the peak of memory."""
        from twinkle_core import registry

        [device] = self.devices
        times = [end - begin for begin, end in zip(self.ends, self.ends[1:], strict=False)]
        return {"device": device, "steps": len(self.losses), "loss_first": self.losses[0], "loss_last": self.losses[-1],
                "step_ms": 1000 * median(times),  # reading the loss waits for the device, so this is not the time of a launch only
                "peak_memory_mib": registry.resolve("platforms", device)().peak_memory_bytes(0) / 2**20}


def watch(program: Path, device: str, epochs: int) -> None:
    """Run a program in this process; print the figures as the last line."""
    watched = Watch()
    if program == QUICKSTART:
        runpy.run_path(str(program))["main"](epochs, device=device, mixed_precision=PRECISIONS[device])
    else:
        runpy.run_path(str(program), run_name="__main__")
    print(json.dumps(watched.figures()))


def run(program: Path, device: str, epochs: int, cache: Path) -> tuple[list[str], dict[str, Any]]:
    """Run a program in a process of its own, and return the lines that it printed and the figures."""
    environ = {**os.environ, "MODELSCOPE_CACHE": str(cache)}
    if device == "cpu":
        environ["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, __file__, "--device", device, "--epochs", str(epochs), "--watch", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cache, env=environ, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{program.name} ended with status {done.returncode}:\n{done.stderr}")
    *lines, figures = done.stdout.splitlines()
    return lines, json.loads(figures)


def main() -> int:
    """Run both and say whether they trained on the device."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=sorted(PRECISIONS), default="cuda")
    parser.add_argument("--epochs", type=int, default=4, help="of the quickstart")
    parser.add_argument("--watch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watch:
        watch(options.watch, options.device, options.epochs)
        return 0
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("This script needs a CUDA device; torch.cuda.is_available() is False. Try it with: --device cpu", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder).resolve()
        subprocess.run([sys.executable, str(ROOT / "tests" / "tools" / "modelscope_standin.py"), str(cache)], check=True,
                       stdout=subprocess.DEVNULL)
        printed, single = run(SINGLE, options.device, options.epochs, cache)
        said, quickstart = run(QUICKSTART, options.device, options.epochs, cache)
    single["printed"] = ast.literal_eval(printed[-1])  # the dict that the program prints
    quickstart["answer"] = next(line for line in said if line.strip().startswith("after:")).partition("after:")[2].strip()
    single["has_learnt"] = single["loss_last"] < single["loss_first"]
    quickstart["has_learnt"] = quickstart["loss_last"] < quickstart["loss_first"] / 2 and "Twinkle" in quickstart["answer"]
    results = {"single.py": single, "quickstart.py": quickstart}
    is_right = all(result["device"] == options.device and result["has_learnt"] for result in results.values())
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print(json.dumps({"device": name, "torch": torch.__version__, **results, "ok": is_right}))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
