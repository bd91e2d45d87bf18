"""The script that measures a mesh of one rank on a GPU, run without one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("run_mesh.py")


@pytest.mark.slow
def test_on_the_cpu_both_sides_give_the_same_losses(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, str(SCRIPT), "--device", "cpu", "--steps", "6"], cwd=tmp_path, capture_output=True,
                         text=True, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["ok"] is True
    assert result["largest_relative_difference_of_loss"] < 1e-4
    assert result["ratio"] > 0
    assert [result[side]["device"] for side in ("twinkle", "hand")] == ["cpu", "cpu"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so() -> None:
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert "needs a CUDA device" in run.stderr


def test_an_unknown_argument_is_refused() -> None:
    run = subprocess.run([sys.executable, str(SCRIPT), "--device", "tpu"], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "invalid choice: 'tpu'" in run.stderr
