"""The same loop on one device and on meshes of processes: losses, gradient norms and weights are the same."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("train.py")
TWINKLE = Path(sys.executable).with_name("twinkle")
RELATIVE = 1e-5
"""fp32: sums are taken in another order. Measured: 3e-6 on the norm, 3e-7 on the loss."""


def launch(folder: Path, mesh: str, ranks: int, *arguments: str) -> dict[str, Any]:
    run = subprocess.run(
        [str(TWINKLE), "launch", "--mode", "torchrun", "--nproc-per-node", str(ranks), "--mesh", mesh, str(SCRIPT), *arguments],
        cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.strip().splitlines()[-1])


@cache
def one_device(*arguments: str) -> dict[str, Any]:
    run = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.strip().splitlines()[-1])


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert len(found["steps"]) == len(expected["steps"]) > 0
    for (step, loss, norm), (own_step, own_loss, own_norm) in zip(found["steps"], expected["steps"], strict=True):
        assert step == own_step
        assert loss == pytest.approx(own_loss, rel=RELATIVE)
        assert norm == pytest.approx(own_norm, rel=RELATIVE)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, norm in expected["weights"].items():
        assert found["weights"][name] == pytest.approx(norm, rel=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("3", "--said"), ("3", "--lora")], ids=["whole, accumulation said", "lora, done"])
@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2", "tp=2", "pp=2"])
def test_two_ranks_train_as_one_device(mesh: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    check_same(launch(tmp_path, mesh, 2, *arguments), one_device(*arguments))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=2,tp=2", "pp=2,tp=2"])
def test_four_ranks_train_as_one_device(mesh: str, tmp_path: Path) -> None:
    check_same(launch(tmp_path, mesh, 4, "2"), one_device("2"))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=2", "tp=2", "pp=2"])
def test_a_checkpoint_of_a_mesh_resumes_there_bit_for_bit_and_on_one_device(mesh: str, tmp_path: Path) -> None:
    whole = launch(tmp_path, mesh, 2, "3", "--save", str(tmp_path))
    check = str(tmp_path / "c")
    resumed = launch(tmp_path, mesh, 2, "3", "--resume", check)
    assert resumed["steps"] == whole["steps"][1:]
    assert resumed["weights"] == whole["weights"]
    check_same(one_device("3", "--resume", check), {"steps": whole["steps"][1:], "weights": whole["weights"]})
