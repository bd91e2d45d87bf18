"""The quickstart teaches the model its name, and leaves behind what README.md says, where it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ["launch", "--log-dir", "outputs/quickstart", "--plot"]


@pytest.mark.slow
def test_two_epochs_teach_the_name_and_leave_checkpoint_numbers_and_curve(tmp_path: Path) -> None:
    twinkle = Path(sys.executable).with_name("twinkle")
    command = [twinkle, *COMMAND, ROOT / "examples" / "quickstart.py", "2"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    before, after = (run.stdout.partition(f"{word}:")[2].splitlines()[0] for word in ("before", "after"))
    assert "Twinkle" in after
    assert "Twinkle" not in before
    assert run.stdout.splitlines()[-1] == "checkpoint: outputs/quickstart/model"
    left = tmp_path / "outputs" / "quickstart"
    assert (left / "model" / "model.safetensors").is_file()
    assert (left / "loss.png").read_bytes().startswith(b"\x89PNG")
    losses = [json.loads(line)["loss"] for line in (left / "metrics.jsonl").open()]
    assert losses[-1] < losses[0] / 2
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["quickstart"]


def test_the_commands_that_are_documented_are_the_one_that_is_tested() -> None:
    command = " ".join([*COMMAND, "examples/quickstart.py"])
    for place in ("Makefile", "examples/quickstart.py"):
        assert command in (ROOT / place).read_text(encoding="utf-8"), place
