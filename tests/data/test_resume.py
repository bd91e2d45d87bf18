"""Positions: a resumed loop goes on exactly where the saved one stood."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_core import session
from twinkle_core.dataloader import DataLoader
from twinkle_core.dataloader.positions import STATE_FILE, collect_states
from twinkle_core.errors import ArgumentTypeError, CheckpointError, ModeError
from twinkle_core.mesh import DeviceMesh


def features(count):
    return [{"input_ids": [i], "labels": [i]} for i in range(count)]


def ids(batch):
    return [item["row_id"] for item in batch]


def run(loader, steps):
    """The row numbers of the next `steps` batches, over as many epochs as it takes, and the state after the last."""
    seen, state = [], loader.get_state()
    while len(seen) < steps:
        for batch in loader:
            seen.append(ids(batch))
            state = json.loads(json.dumps(loader.get_state()))
            if len(seen) == steps:
                break
    return seen, state


@settings(max_examples=60)
@given(rows=st.integers(1, 20), batch_size=st.integers(1, 7), shuffle=st.booleans(), workers=st.integers(0, 1),
       stops=st.lists(st.integers(1, 12), min_size=1, max_size=3))
def test_a_run_that_is_stopped_and_resumed_any_number_of_times_sees_what_one_run_sees(rows, batch_size, shuffle, workers, stops):
    def make():
        return DataLoader(features(rows), batch_size=batch_size, shuffle=shuffle, seed=3, num_workers=workers)

    expected, _ = run(make(), sum(stops) + 5)
    seen, state = [], None
    for steps in (*stops, 5):
        loader = make()
        if state is not None:
            loader.resume_from_checkpoint(state)
        more, state = run(loader, steps)
        seen += more
    assert seen == expected


def test_the_state_inside_the_loop_counts_the_batch_at_hand():
    loader = DataLoader(features(10), batch_size=4)
    states = [(state["epoch"], state["rows"]) for _ in range(2) for _ in loader for state in [loader.get_state()]]
    assert states == [(0, 4), (0, 8), (1, 0), (1, 4), (1, 8), (2, 0)]


def test_a_state_before_the_first_batch_is_the_beginning():
    loader = DataLoader(features(4))
    assert (loader.get_state()["epoch"], loader.get_state()["rows"]) == (0, 0)
    loader.resume_from_checkpoint(loader.get_state())
    assert len(list(loader)) == 4


def test_the_skip_applies_to_the_first_epoch_only():
    loader = DataLoader(features(10), batch_size=4)
    loader.resume_from_checkpoint({**loader.get_state(), "epoch": 2, "rows": 8})
    assert [[ids(batch) for batch in loader] for _ in range(2)] == [[[8, 9]], [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]]
    assert loader.get_state()["epoch"] == 4


def test_a_state_taken_right_after_resuming_is_the_same_state():
    loader = DataLoader(features(10), batch_size=4)
    state = {**loader.get_state(), "epoch": 1, "rows": 4}
    loader.resume_from_checkpoint(state)
    assert loader.get_state() == state


def test_resuming_in_the_middle_of_a_loop_ends_that_loop():
    loader = DataLoader(features(10), batch_size=4, shuffle=True, num_workers=1)
    for batch in loader:
        first, state = ids(batch), loader.get_state()
        break
    loader.resume_from_checkpoint(state)
    rest = [row for batch in loader for row in ids(batch)]
    assert sorted(first + rest) == list(range(10))


def test_an_old_loop_that_ends_late_does_not_end_the_resumed_one():
    loader = DataLoader(features(4))
    old = iter(loader)
    next(old)
    loader.resume_from_checkpoint(loader.get_state())
    new = iter(loader)
    assert ids(next(new)) == [1]
    with pytest.raises(ModeError, match="was ended by another one"):
        next(old)
    assert [ids(batch) for batch in new] == [[2], [3]]


@pytest.mark.parametrize("mesh", [DeviceMesh(dp=2), DeviceMesh(fsdp=2, tp=2)], ids=str)
def test_a_state_holds_on_another_mesh(monkeypatch, mesh):
    one = DataLoader(features(11), batch_size=4, shuffle=True, seed=1)
    _, state = run(one, 1)
    rest = [ids(batch) for batch in run_rest(one, state)]
    joined = [[] for _ in rest]
    for rank in range(mesh.world_size):
        session.stop()
        for name, value in (("TORCHELASTIC_RUN_ID", "test"), ("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", mesh.world_size)):
            monkeypatch.setenv(name, str(value))
        loader = DataLoader(features(11), batch_size=4, shuffle=True, seed=1, device_mesh=mesh)
        loader.resume_from_checkpoint(state)
        if mesh.coordinates(rank)["tp"] == 0:
            joined = [have + ids(batch) for have, batch in zip(joined, loader, strict=True)]
    assert joined == rest


def run_rest(loader, state):
    loader.resume_from_checkpoint(state)
    return list(loader)


@pytest.fixture
def checkpoint(tmp_path):
    def write(states=None):
        (tmp_path / STATE_FILE).write_text(json.dumps(collect_states() if states is None else states))
        return tmp_path

    return write


def test_a_checkpoint_holds_the_positions_of_all_live_loaders(checkpoint):
    train, held_out = DataLoader(features(10), batch_size=2, shuffle=True), DataLoader(features(4))
    run(train, 3)
    run(held_out, 1)
    path = checkpoint()
    session.stop()
    train_2, held_out_2 = DataLoader(features(10), batch_size=2, shuffle=True), DataLoader(features(4))
    held_out_2.resume_from_checkpoint(path)
    train_2.resume_from_checkpoint(str(path))
    assert (train_2.get_state(), held_out_2.get_state()) == (train.get_state(), held_out.get_state())
    assert train_2.get_state()["rows"] == 6


def test_loaders_that_look_alike_are_told_apart_by_the_order_they_were_made_in(checkpoint):
    first, second = DataLoader(features(10)), DataLoader(features(10))
    run(first, 3)
    run(second, 7)
    path = checkpoint()
    session.stop()
    again = [DataLoader(features(10)), DataLoader(features(10))]
    for loader in reversed(again):
        loader.resume_from_checkpoint(path)
    assert [loader.get_state()["rows"] for loader in again] == [3, 7]


def test_a_third_loader_of_a_kind_has_no_position(checkpoint):
    saved = DataLoader(features(10))
    path = checkpoint()
    del saved
    session.stop()
    loaders = [DataLoader(features(10)) for _ in range(2)]
    loaders[0].resume_from_checkpoint(path)
    with pytest.raises(CheckpointError, match="holds 1 positions of a data loader with .* but this is number 2 of that kind"):
        loaders[1].resume_from_checkpoint(path)


def test_another_loader_is_refused_with_both_fingerprints(checkpoint):
    saved = DataLoader(features(10), batch_size=2, seed=5)
    path, state = checkpoint(), saved.get_state()
    session.stop()
    other = DataLoader(features(10), batch_size=4, seed=5)
    before = other.get_state()
    message = r"has rows=10, batch_size=4, shuffle=False, seed=5; .*rows=10, batch_size=2, shuffle=False, seed=5\. Build dataset"
    with pytest.raises(CheckpointError, match=message):
        other.resume_from_checkpoint(path)
    with pytest.raises(CheckpointError, match=message):
        other.resume_from_checkpoint(state)
    assert other.get_state() == before


@pytest.mark.parametrize(("text", "message"), [
    (None, "holds no data position .* Save with `with_optimizer=True`"),
    ("[{", "cannot be read: .* The checkpoint is damaged"),
    ("{}", "holds a dict, not a list of positions"),
    ("[3]", "holds a int where the state of a data loader belongs"),
    ('[{"fingerprint": {}, "epoch": 0}]', "has `rows` of type int, this one has None"),
    ('[{"fingerprint": {"rows": 3}, "epoch": 0, "rows": 4}]',
     "epoch 0, row 4 lies outside rows=3. The state is damaged; use another checkpoint"),
])
def test_a_damaged_position_is_an_error(tmp_path, text, message):
    if text is not None:
        (tmp_path / STATE_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        DataLoader(features(3)).resume_from_checkpoint(tmp_path)


def test_a_path_that_is_no_checkpoint_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="is not a folder"):
        DataLoader(features(3)).resume_from_checkpoint(tmp_path / "nowhere")


def test_nothing_to_resume_from_is_said():
    with pytest.raises(ArgumentTypeError, match="got False.*returns False when there is nothing to resume from"):
        DataLoader(features(3)).resume_from_checkpoint(False)


def test_states_are_collected_without_a_session():
    assert collect_states() == []
