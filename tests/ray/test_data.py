"""Datasets and data loaders on Ray: in the script's process, or in a group; and their positions in checkpoints."""

import json
from pathlib import Path

import pytest

from twinkle_core.data_format import InputFeature
from twinkle_core.dataloader import DataLoader
from twinkle_core.dataset import Dataset, DatasetMeta
from twinkle_core.model.transformers_model import TransformersModel
from twinkle_ray.lazy import LazyResult

FEATURES: list[InputFeature] = [{"input_ids": [n, n + 1, n + 2], "labels": [-100, n + 1, n + 2]} for n in range(1, 8)]


def ids(batches) -> list[list[int]]:
    return [[feature["input_ids"][0] for feature in batch] for batch in batches]


def test_without_a_group_datasets_and_loaders_stay_with_the_script_and_give_whole_batches(start) -> None:
    start(ranks=2)
    loader = DataLoader(FEATURES, batch_size=3)
    assert type(loader) is DataLoader
    assert ids(loader) == [[1, 2, 3], [4, 5, 6], [7]]


@pytest.mark.slow
def test_a_loader_and_its_dataset_in_a_group_give_the_same_batches(start) -> None:
    rows = [{"messages": [{"role": "user", "content": str(n)}, {"role": "assistant", "content": "x"}]} for n in range(5)]
    here = [[row["messages"][0]["content"] for row in batch] for batch in DataLoader(rows, batch_size=2)]
    from twinkle_core import session

    session.stop()
    start(data=1)
    dataset = Dataset(DatasetMeta(data=rows), remote_group="data")
    loader = DataLoader(dataset, batch_size=2, remote_group="data")
    assert (len(dataset), len(loader)) == (5, 3)
    assert [[row["messages"][0]["content"] for row in batch] for batch in loader] == here


def test_lazy_batches_of_a_loader_in_a_group_stay_there(start) -> None:
    start(data=1, lazy_collect=True)
    loader = DataLoader(FEATURES, batch_size=3, remote_group="data")
    batches = list(loader)
    assert [type(batch) for batch in batches] == [LazyResult] * 3
    assert ids(batches) == [[1, 2, 3], [4, 5, 6], [7]]


@pytest.mark.slow
@pytest.mark.parametrize("group", [None, "data"])
def test_the_position_of_a_loader_is_in_the_checkpoint_that_a_rank_writes(start, tmp_path: Path, group: str | None) -> None:
    start(model=2, data=1)
    model = TransformersModel("tiny://qwen3", remote_group="model")
    loader = DataLoader(FEATURES, batch_size=2, remote_group=group)
    for step, batch in enumerate(loader):
        model.forward_backward(batch)
        model.clip_grad_and_step()
        if step == 1:
            saved = model.save("half", output_dir=str(tmp_path), with_optimizer=True)
            break
    [state] = json.loads((Path(saved) / "data_state.json").read_text())
    assert (state["epoch"], state["rows"]) == (0, 4)
    fresh = DataLoader(FEATURES, batch_size=2, remote_group=group)
    del loader
    assert model.resume_from_checkpoint(str(tmp_path)) == saved
    fresh.resume_from_checkpoint(saved)
    assert ids(fresh) == [[5, 6], [7]]


@pytest.mark.slow
def test_lazy_batches_and_outputs_train_as_eager_ones(start) -> None:
    found = []
    for lazy in (False, True):
        start(model=2, data=1, lazy_collect=lazy)
        model = TransformersModel("tiny://qwen3", remote_group="model")
        for batch in DataLoader(FEATURES, batch_size=3, remote_group="data"):
            model.forward_backward(batch)
            model.clip_grad_and_step()
        found.append(model.calculate_metric(is_training=True))
        from twinkle_core import session

        session.stop()
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-6)
    assert found[0]["step"] == found[1]["step"] == 3
