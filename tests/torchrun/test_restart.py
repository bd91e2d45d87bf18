"""A rank is killed, the script is run again, and training goes on from the newest complete checkpoint with the same numbers."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinkle_core.checkpoint.folder import complete_checkpoints
from twinkle_core.checkpoint.manifest import verify

SCRIPT = Path(__file__).with_name("restart.py").read_text()


def run(launch: Callable[..., Any], folder: Path, steps: int, deaths: list[str], *options: str) -> list[list[dict[str, Any]]]:
    """Return what each start printed, and at last what the uninterrupted training did."""
    ended = launch(SCRIPT, "--max-restarts", str(len(deaths)), *options, arguments=(str(steps), ",".join(deaths)))
    assert ended.status == 0, ended.stderr[-3000:]
    assert ended.stderr.count("was killed by signal 9 (SIGKILL)") == len(deaths)
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    *interrupted, whole = [lines[:-steps], lines[-steps:]]
    starts = [[line for line in interrupted[0] if line["start"] == start] for start in range(len(deaths) + 1)]
    left = complete_checkpoints(folder / "checkpoints")
    assert [manifest.step for _, manifest in left] == [steps - 1, steps]
    for path, _ in left:
        verify(path)
    assert len(list((folder / "checkpoints").iterdir())) == 2  # nothing of the saves that were cut short
    return [*starts, whole]


def numbers(lines: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["norm"]) for line in lines]


@pytest.mark.slow
def test_a_rank_killed_in_a_save_costs_only_the_steps_since_the_last_complete_checkpoint(launch, tmp_path: Path) -> None:
    """Rank 0 is killed in the save after step 3, when everything is written but not renamed."""
    first, second, whole = run(launch, tmp_path, 4, ["0@3@manifest"], "--mesh", "fsdp=2")
    assert [[line["step"] for line in start] for start in (first, second)] == [[1, 2, 3], [3, 4]]
    assert numbers(first) == numbers(whole)[:3]
    assert numbers(second) == numbers(whole)[2:]


PLACES = ["1@2@begin", "0@3@files", "0@4@manifest", "0@5@rename"]
TIMES = [f"{rank}@{step}@{milliseconds}" for step, (rank, milliseconds) in enumerate(itertools.product((0, 1), (0, 15, 60)), 2)]


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("deaths", [PLACES, TIMES], ids=["at a place", "at a time"])
@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2", "tp=2", "pp=2"])
def test_wherever_a_save_is_cut_short_the_checkpoint_before_it_is_whole_and_training_goes_on_from_it(
    launch, tmp_path: Path, mesh: str, deaths: list[str],
) -> None:
    steps = len(deaths) + 3
    *starts, whole = run(launch, tmp_path, steps, deaths, "--mesh", mesh)
    expected = {step: (loss, norm) for step, loss, norm in numbers(whole)}
    assert [(loss, norm) for start in starts for _, loss, norm in numbers(start)] == [
        expected[step] for start in starts for step, _, _ in numbers(start)]
    assert {line["step"] for start in starts for line in start} == set(range(1, steps + 1))
