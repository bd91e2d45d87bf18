"""On a machine with a GPU: the contract program and the quickstart in bf16 on cuda; prints one JSON object.

    python tests/gpu/run_gpu.py      # in an environment with `twinkle-core[train]` and `twinkle-qwen`; needs no network

The contract program runs as it stands, in a process of its own, with the stand-in ModelScope cache. The quickstart's loop runs
here, in bf16 mixed precision, so that memory and step time can be read. Exit status 0 only if both trained on the GPU.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
BASE = "tiny://qwen3_5"
STEPS = 120


def contract(cache: Path) -> dict[str, float]:
    """Run single.py unedited and return what it printed."""
    subprocess.run([sys.executable, str(ROOT / "tests" / "tools" / "modelscope_standin.py"), str(cache)], check=True,
                   stdout=subprocess.DEVNULL)
    program = ROOT / "tests" / "contract" / "single.py"
    run = subprocess.run([sys.executable, str(program)], check=True, capture_output=True, text=True, cwd=cache,
                         env={**os.environ, "MODELSCOPE_CACHE": str(cache)})
    return ast.literal_eval(run.stdout.strip().splitlines()[-1])  # the dict that the program prints


def quickstart() -> dict[str, object]:
    """Train the quickstart's model in bf16 on cuda; return losses, step time and peak memory."""
    import torch

    from twinkle.data_format import SamplingParams
    from twinkle.dataloader import DataLoader
    from twinkle.dataset import Dataset, DatasetMeta
    from twinkle.model import TransformersModel
    from twinkle.sampler import TorchSampler

    data = Dataset(DatasetMeta("tiny://self-cognition"))
    data.map("SelfCognitionProcessor", model_name="Twinkle", model_author="the Twinkle team")
    data.set_template("Qwen3_5Template", model_id=BASE)
    data.encode()
    model = TransformersModel(model_id=BASE, device="cuda", mixed_precision="bf16")
    model.set_optimizer("AdamW", lr=3e-3)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    losses, times = [], []
    while len(losses) < STEPS:
        for batch in loader:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            model.forward_backward(inputs=batch)
            model.clip_grad_and_step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
            losses.append(model.calculate_metric(is_training=True)["loss"])
    with tempfile.TemporaryDirectory() as folder:
        sampler = TorchSampler(model_id=model.save("gpu", folder), device="cuda")
        sampler.set_template("Qwen3_5Template", model_id=BASE)
        question = {"messages": [{"role": "user", "content": "Who are you?"}]}
        answer = sampler.sample([question], SamplingParams(temperature=0, max_tokens=48))[0].sequences[0].decoded
    return {"loss_first": losses[0], "loss_last": losses[-1], "step_ms": 1000 * median(times[10:]),
            "peak_memory_mib": torch.cuda.max_memory_allocated() / 2**20, "answer": answer,
            "has_learnt": losses[-1] < losses[0] / 2 and "Twinkle" in answer}


def main() -> int:
    """Run both and say whether they trained."""
    import torch

    if not torch.cuda.is_available():
        print("This script needs a CUDA device; torch.cuda.is_available() is False.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        printed = contract(Path(folder).resolve())
    trained = quickstart()
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps({**versions, "single.py": printed, "quickstart": trained}))
    return 0 if trained["has_learnt"] else 1


if __name__ == "__main__":
    sys.exit(main())
