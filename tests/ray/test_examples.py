"""The examples and the contract program run on Ray by options only."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TWINKLE = str(Path(sys.executable).with_name("twinkle"))


def output(*command: str, folder: Path, **environ: str) -> str:
    run = subprocess.run(command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", **environ}, capture_output=True, text=True,
                         check=False, timeout=250)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def on_ray(cluster: str, example: str, *arguments: str, folder: Path, options: tuple[str, ...] = ()) -> str:
    return output(TWINKLE, "launch", "--mode", "ray", "--address", cluster, *options, str(ROOT / "examples" / example), *arguments,
                  folder=folder)


@pytest.mark.slow
@pytest.mark.parametrize(("example", "arguments", "options", "text"), [
    ("sft.py", ("--epochs", "1"), ("--nproc-per-node", "2"), "checkpoint: outputs/sft/name"),
    ("dpo.py", ("--epochs", "1"), ("--nproc-per-node", "2"), "margin between chosen and rejected: 0.000 ->"),
    ("grpo.py", ("--ranks", "2", "--epochs", "1", "--steps", "2"), (), "step 2: mean reward"),
    ("distill.py", ("--ranks", "1", "--epochs", "4", "--steps", "2"), (), "divergence"),
])
def test_an_example_runs_on_groups(cluster, tmp_path, example: str, arguments, options, text: str) -> None:
    assert text in on_ray(cluster, example, *arguments, folder=tmp_path, options=options)


@pytest.mark.slow
def test_the_contract_program_trains_on_what_it_samples(cluster, ms_cache: Path, tmp_path: Path) -> None:
    found = output(sys.executable, str(ROOT / "tests" / "contract" / "cluster.py"), folder=tmp_path, SAMPLER="TorchSampler",
                   RAY_ADDRESS=cluster)
    numbers = ast.literal_eval(found.strip().splitlines()[-1])
    assert numbers["step"] == 4
    assert numbers["num_tokens"] > 0
    assert numbers["grad_norm"] > 0
    assert "group sampler: 2 rank(s) on cpu" in found
