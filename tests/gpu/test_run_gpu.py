"""The script for machines with a GPU, run without one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("run_gpu.py")


@pytest.mark.slow
def test_on_the_cpu_both_programs_train_and_give_their_figures(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, str(SCRIPT), "--device", "cpu", "--epochs", "2"], cwd=tmp_path, capture_output=True,
                         text=True, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["ok"] is True
    assert result["single.py"]["steps"] == result["single.py"]["printed"]["step"] == 14
    assert "Twinkle" in result["quickstart.py"]["answer"]
    for name in ("single.py", "quickstart.py"):
        assert result[name]["device"] == "cpu"
        assert result[name]["peak_memory_mib"] > 50
        assert result[name]["step_ms"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so() -> None:
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert "needs a CUDA device" in run.stderr
