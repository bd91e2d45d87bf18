"""The contract program of torchrun runs unedited in its three topologies, with the numbers of one device."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).resolve().parents[1] / "contract"
BIN = Path(sys.executable).parent
COMMANDS = {
    "fsdp4-dp2": [str(BIN / "torchrun"), "--nproc_per_node", "8"],
    "tp2-pp4": [str(BIN / "twinkle"), "launch", "--mode", "torchrun", "--nproc-per-node", "8"],
    "tp2-pp2-dp2": [str(BIN / "torchrun"), "--nproc_per_node", "8"],
}


def numbers(command: list[str], folder: Path, **environment: str) -> dict[str, float]:
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=280,
                         env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    assert run.returncode == 0, run.stderr[-3000:]
    return ast.literal_eval(next(line for line in run.stdout.splitlines() if line.startswith("{")))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", list(COMMANDS))
def test_a_topology_gives_the_numbers_of_one_device(mesh: str, ms_cache: Path, tmp_path: Path) -> None:
    expected = numbers([sys.executable, str(PROGRAMS / "single.py")], tmp_path)
    found = numbers([*COMMANDS[mesh], str(PROGRAMS / "spmd.py")], tmp_path, MESH=mesh)
    for name in ("loss", "grad_norm", "num_tokens", "step", "lr"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
