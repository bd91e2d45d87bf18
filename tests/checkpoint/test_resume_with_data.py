"""Model and data loader resume together: no row is trained twice and none is lost."""

from pathlib import Path

import pytest

from twinkle_core import session
from twinkle_core.dataloader import DataLoader
from twinkle_core.model.transformers_model import TransformersModel

EPOCHS, BATCH_SIZE = 2, 3
ROWS = [{"input_ids": [row + 1, row + 2, row + 3], "labels": [-100, row + 2, row + 3], "row_id": row} for row in range(10)]


class Interrupted(Exception):
    """Stands for whatever ends a run."""


def run(folder: Path, output: Path, *, stop_after: int | None = None, saves: bool = False) -> list[tuple[list[int], float]]:
    """Train for two epochs, or what is left of them, and return (row ids, loss) of each batch."""
    session.stop()
    model = TransformersModel(str(folder), device="cpu")
    loader = DataLoader(dataset=ROWS, batch_size=BATCH_SIZE, shuffle=True, seed=7)
    checkpoint = model.resume_from_checkpoint(str(output))
    if checkpoint:
        loader.resume_from_checkpoint(checkpoint)
    seen: list[tuple[list[int], float]] = []
    try:
        while loader.get_state()["epoch"] < EPOCHS:
            for batch in loader:
                loss = model.forward_backward(inputs=batch)["loss"]
                model.clip_grad_and_step()
                seen.append(([row["row_id"] for row in batch], loss))
                if saves:
                    model.save("last", str(output), with_optimizer=True, keep_last=1)
                if len(seen) == stop_after:
                    raise Interrupted
    except Interrupted:
        pass
    return seen


@pytest.mark.parametrize("stops", [
    pytest.param((2, 1), id="twice in one epoch"), pytest.param((4,), id="at the boundary of epochs"),
    pytest.param((1,), id="in the first epoch", marks=pytest.mark.slow),
    pytest.param((7,), id="in the last epoch", marks=pytest.mark.slow),
    pytest.param((5, 2), id="twice in two epochs", marks=pytest.mark.slow)])
def test_an_interrupted_run_sees_the_same_rows_and_losses(tiny, tmp_path, stops):
    whole = run(tiny("qwen3"), tmp_path / "whole")
    pieces: list[tuple[list[int], float]] = []
    for stop in stops:
        pieces += run(tiny("qwen3"), tmp_path / "pieces", stop_after=stop, saves=True)
    pieces += run(tiny("qwen3"), tmp_path / "pieces")
    assert pieces == whole
    assert sorted(row for rows, _ in whole[:4] for row in rows) == list(range(10))
    assert len(whole) == 8
