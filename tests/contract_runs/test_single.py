"""The contract program of one device runs unedited, both ways, and trains."""

import ast
import importlib.util
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from twinkle_core.model.transformers_model import TransformersModel

PROGRAM = Path(__file__).resolve().parents[1] / "contract" / "single.py"
BIN = Path(sys.executable).parent


@pytest.mark.slow
@pytest.mark.parametrize("command", [[sys.executable], [str(BIN / "twinkle"), "launch"]], ids=["python", "twinkle launch"])
def test_it_runs_as_it_stands(command: list[str], ms_cache: Path, tmp_path: Path) -> None:
    run = subprocess.run([*command, str(PROGRAM)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    metrics = ast.literal_eval(run.stdout.strip().splitlines()[-1])
    assert metrics["step"] == math.ceil(108 / 8)
    assert all(isinstance(value, int | float) and math.isfinite(value) for value in metrics.values())
    assert list(tmp_path.iterdir()) == []


def test_it_moves_the_weights_and_lowers_the_loss(ms_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("single", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    single = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(single)
    made: list[TransformersModel] = []

    def remember(**arguments: Any) -> TransformersModel:
        made.append(TransformersModel(**arguments))
        return made[-1]

    monkeypatch.setattr(single, "TransformersModel", remember)
    single.main()
    before = TransformersModel(model_id=single.BASE).get_state_dict()
    after = made[0].get_state_dict()
    assert before.keys() == after.keys()
    assert all(not before[name].equal(after[name]) for name in before if before[name].is_floating_point())
    data = single.Dataset(dataset_meta=single.DatasetMeta("ms://swift/self-cognition"))
    data.set_template("Qwen3_5Template", model_id=single.BASE)
    data.encode()
    batch = [data[i] for i in range(16)]
    assert made[0].forward_only(inputs=batch)["loss"] < TransformersModel(model_id=single.BASE).forward_only(inputs=batch)["loss"]
