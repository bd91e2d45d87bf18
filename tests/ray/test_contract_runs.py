"""Whole scripts on Ray, as people start them: the contract program unedited, and plain `python`."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TWINKLE = str(Path(sys.executable).with_name("twinkle"))
PROGRAM = str(ROOT / "tests" / "contract" / "single.py")
SCRIPT = """
import sys
import twinkle
twinkle.initialize(mode="ray", nproc_per_node=2, address=sys.argv[1])
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset
from twinkle.model import TransformersModel
from twinkle.sampler import TorchSampler

def token_mean(outputs, targets, **inputs):
    mask = targets != -100
    return -(outputs.logprobs * mask).sum(), mask.sum()

def short(row):
    return {"messages": row["messages"][-2:]} if "messages" in row else row

data = Dataset("tiny://self-cognition")
data.map(short)
data.set_template("Qwen3_5Template", model_id="tiny://qwen3_5")
data.encode()
first, second = TransformersModel("tiny://qwen3_5"), TransformersModel("tiny://qwen3")
sampler = TorchSampler("tiny://qwen3_5")
first.set_loss(token_mean)
loader = DataLoader(data, batch_size=6)
for step, batch in enumerate(loader):
    for model in (first, second):
        model.forward_backward(batch)
        model.clip_grad_and_step()
    if step == 1:
        break
print(len(sampler.sample([{"input_ids": [1, 2, 3]}] * 3, {"max_tokens": 2})))
print({name: model.calculate_metric(is_training=True) for name, model in (("first", first), ("second", second))})
"""


def run(*command: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", **environ}, capture_output=True,
                          text=True, check=False, timeout=250)


@pytest.mark.slow
def test_the_contract_program_of_one_device_gives_its_numbers_on_two_ranks(cluster, ms_cache, tmp_path: Path) -> None:
    def numbers(*command: str) -> dict[str, float]:
        done = run(*command, PROGRAM, folder=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        return ast.literal_eval(next(line for line in done.stdout.splitlines() if line.startswith("{")))

    expected = numbers(sys.executable)
    found = numbers(TWINKLE, "launch", "--mode", "ray", "--address", cluster, "--nproc-per-node", "2")
    for name in ("loss", "grad_norm", "num_tokens", "step", "lr"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name


@pytest.mark.slow
def test_a_plain_script_trains_two_models_and_samples_on_one_group_with_its_own_functions(cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run(sys.executable, "train.py", cluster, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    count, numbers = done.stdout.splitlines()[-2:]
    assert count == "3"
    found = ast.literal_eval(numbers)
    assert [found[name]["step"] for name in ("first", "second")] == [2, 2]
    assert all(0 < found[name]["loss"] < 20 for name in found)
