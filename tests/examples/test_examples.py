"""The examples teach what they say, on one device and, where they say so, under torchrun."""

import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TWINKLE = str(Path(sys.executable).with_name("twinkle"))


def example(name: str, **arguments):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](**arguments)


@pytest.mark.slow
def test_sft_through_a_lora_lowers_the_loss(tmp_path: Path) -> None:
    losses = example("sft", epochs=1, output_dir=str(tmp_path))
    assert losses[-1] < losses[0] / 2
    assert (tmp_path / "name" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_dpo_widens_the_margin() -> None:
    margins = example("dpo", epochs=1)
    assert margins[0] == pytest.approx(0, abs=1e-4)
    assert margins[-1] > 0.1


@pytest.mark.soak
def test_distillation_teaches_the_teacher_s_answers() -> None:
    begin, end = example("distill")
    assert begin < 0.2
    assert end >= 0.7


@pytest.mark.soak
def test_grpo_learns_to_add_in_five_minutes() -> None:
    began = time.monotonic()
    means = example("grpo")
    assert sum(means[:3]) / 3 < 0.4
    assert sum(means[-5:]) / 5 > 0.8
    assert time.monotonic() - began < 300


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "text"), [
    ("sft", "fsdp=2", "checkpoint: outputs/sft/name"), ("dpo", "dp=2", "margin between chosen and rejected: 0.000 ->"),
])
def test_an_example_runs_under_torchrun(tmp_path: Path, name: str, mesh: str, text: str) -> None:
    run = subprocess.run([TWINKLE, "launch", "--mode", "torchrun", "--nproc-per-node", "2", "--mesh", mesh,
                          str(EXAMPLES / f"{name}.py"), "--epochs", "1"],
                         cwd=tmp_path, capture_output=True, text=True, check=False, timeout=250)
    assert run.returncode == 0, run.stderr[-3000:]
    assert text in run.stdout
