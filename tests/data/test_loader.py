"""The order of rows, batches, the slices of ranks, epochs and prefetching."""

import gc
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_core import session
from twinkle_core.dataloader import DataLoader
from twinkle_core.dataloader.order import batches, epoch_order, slice_of
from twinkle_core.dataset import Dataset, DatasetMeta
from twinkle_core.errors import ArgumentError, ArgumentTypeError, DataError, ModeError, UnknownArgumentError
from twinkle_core.mesh import DeviceMesh
from twinkle_core.remote.dispatch import dispatch, partition_rows
from twinkle_core.testing.launchers import InProcessCluster


def features(count):
    return [{"input_ids": [i], "labels": [i]} for i in range(count)]


def ids(batch):
    return [item["row_id"] for item in batch]


def as_rank(monkeypatch, rank, world_size):
    """Begin a session in a process that torchrun started."""
    session.stop()
    for name, value in (("TORCHELASTIC_RUN_ID", "test"), ("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world_size)):
        monkeypatch.setenv(name, str(value))


@given(rows=st.integers(1, 200), seed=st.integers(0, 3), epoch=st.integers(0, 3), shuffle=st.booleans())
def test_an_epoch_visits_every_row_once(rows, seed, epoch, shuffle):
    order = epoch_order(rows, shuffle=shuffle, seed=seed, epoch=epoch)
    assert sorted(order) == list(range(rows))
    assert shuffle or list(order) == list(range(rows))


def test_seed_and_epoch_enter_the_order():
    orders = [tuple(epoch_order(50, shuffle=True, seed=seed, epoch=epoch)) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    assert orders[0] == tuple(epoch_order(50, shuffle=True, seed=0, epoch=0))


@given(rows=st.integers(1, 60), batch_size=st.integers(1, 12), sizes=st.sampled_from(
    [{"dp": 1}, {"dp": 2}, {"fsdp": 4, "dp": 2}, {"tp": 2, "pp": 2, "dp": 2}, {"dp": 7}]), seed=st.integers(0, 2))
def test_the_ranks_of_every_mesh_together_visit_every_row_once_in_the_order_of_one_process(rows, batch_size, sizes, seed):
    mesh = DeviceMesh(**sizes)
    order = epoch_order(rows, shuffle=True, seed=seed, epoch=0)
    whole = batches(order, batch_size)
    joined = [[row for data_rank in range(mesh.data_world_size) for row in slice_of(batch, data_rank, mesh.data_world_size)]
              for batch in whole]
    assert joined == [list(batch) for batch in whole]
    assert [row for batch in joined for row in batch] == list(order)


@pytest.mark.parametrize("is_pairs", [False, True])
@pytest.mark.parametrize("mesh", [DeviceMesh(fsdp=4, dp=2), DeviceMesh(tp=2, dp=2, pp=2), DeviceMesh(dp=8)], ids=str)
def test_a_rank_gets_what_slice_dp_would_give_it(monkeypatch, mesh, is_pairs):
    rows = [{"chosen": one, "rejected": one} for one in features(13)] if is_pairs else features(13)
    whole = list(DataLoader(rows, batch_size=5))
    for rank in range(8):
        as_rank(monkeypatch, rank, 8)
        own = list(DataLoader(rows, batch_size=5, device_mesh=mesh))
        assert own == [dispatch("slice_dp", (batch,), {}, mesh)[rank][0][0] for batch in whole]
        bounds = [partition_rows(batch, mesh.data_world_size)[mesh.data_rank(rank)] for batch in whole]
        assert own == [batch[range_.start:range_.stop] for batch, range_ in zip(whole, bounds, strict=True)]


def test_a_rank_may_get_an_empty_list_and_still_takes_part(monkeypatch):
    as_rank(monkeypatch, 3, 4)
    assert [ids(batch) for batch in DataLoader(features(5), batch_size=4, device_mesh=DeviceMesh(dp=4))] == [[3], [4]]
    as_rank(monkeypatch, 0, 4)
    assert [ids(batch) for batch in DataLoader(features(5), batch_size=4, device_mesh=DeviceMesh(dp=4))] == [[0], []]


def test_a_controller_gets_whole_batches_although_there_is_a_mesh():
    assert [ids(batch) for batch in DataLoader(features(5), batch_size=4, device_mesh=None)] == [[0, 1, 2, 3], [4]]
    session.current().mesh = DeviceMesh(dp=4)
    assert [ids(batch) for batch in DataLoader(features(5), batch_size=4)] == [[0, 1, 2, 3], [4]]


def test_the_tail_is_a_smaller_batch_and_the_length_counts_it():
    loader = DataLoader(features(10), batch_size=4)
    assert len(loader) == 3
    assert [len(batch) for batch in loader] == [4, 4, 2]


def test_each_loop_is_the_next_epoch():
    loader = DataLoader(features(20), batch_size=20, shuffle=True, seed=5)
    orders = [ids(batch) for _ in range(3) for batch in loader]
    assert orders == [list(epoch_order(20, shuffle=True, seed=5, epoch=epoch)) for epoch in range(3)]


def test_the_seed_is_the_session_s_unless_one_is_said():
    session.current().seed = 7
    batch = next(iter(DataLoader(features(9), batch_size=9, shuffle=True)))
    assert ids(batch) == list(epoch_order(9, shuffle=True, seed=7, epoch=0))


def test_an_item_is_the_encoded_row_and_its_number(encoded):
    dataset = encoded([{"query": "a", "response": "b", "user_data": {"x": 1}}, {"query": "c", "response": "d"}])
    batch = next(iter(DataLoader(dataset, batch_size=2)))
    assert batch == [{**dataset[0], "row_id": 0}, {**dataset[1], "row_id": 1}]


def test_a_preference_row_is_one_row_and_two_features_chosen_first(encoded):
    dataset = encoded([{"prompt": "p", "chosen": "a", "rejected": "b", "user_data": {"x": i}} for i in range(3)])
    first, last = DataLoader(dataset, batch_size=2)
    assert [(item["row_id"], item["pair_id"], chr(item["input_ids"][-1])) for item in first] == [
        (0, 0, "a"), (0, 0, "b"), (1, 1, "a"), (1, 1, "b")]
    assert [item["user_data"] for item in last] == [{"x": 2}, {"x": 2}]


def test_a_dataset_that_is_not_encoded_gives_conversations():
    dataset = Dataset(DatasetMeta(data=[{"query": "a", "response": "b", "tag": "en"}]))
    assert list(DataLoader(dataset)) == [[{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]]


def test_text_and_pairs_must_be_encoded_first():
    for row in ({"text": "a"}, {"prompt": "p", "chosen": "a", "rejected": "b"}):
        with pytest.raises(DataError, match=r"can only be used as tokens\. Call `dataset\.encode\(\)` first"):
            list(DataLoader(Dataset(DatasetMeta(data=[row]))))
    with pytest.raises(DataError, match=r"Row 0: the column `query` is empty"):
        list(DataLoader(Dataset(DatasetMeta(data=[{"query": None, "response": "x"}]))))


def test_an_item_that_is_no_feature_is_an_error():
    with pytest.raises(DataError, match=r"Row 0 .*neither tokens .* nor a conversation .* but `text`\. Call"):
        list(DataLoader([{"text": "a"}]))


def test_an_epoch_without_a_step_is_an_error(encoded):
    dataset = encoded([{"text": "a"}])
    dataset.filter(lambda row: False)
    with pytest.raises(DataError, match="has 0 rows, so the epoch has no step. Check what `filter`"):
        list(DataLoader(dataset))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_workers_change_neither_order_nor_position(num_workers):
    loader = DataLoader(features(20), batch_size=3, shuffle=True, num_workers=num_workers)
    expected = DataLoader(features(20), batch_size=3, shuffle=True)
    for batch, same in zip(loader, expected, strict=True):
        assert batch == same
        assert loader.get_state() == expected.get_state()


def test_workers_fetch_ahead_of_the_loop():
    fetched = threading.Event()

    class Slow(list):
        def __getitem__(self, row):
            if row == 2:
                fetched.set()
            return super().__getitem__(row)

    loop = iter(DataLoader(Slow(features(4)), num_workers=1))
    next(loop)
    assert fetched.wait(timeout=10), "row 2 is fetched before it is asked for"
    loop.close()


def test_an_error_in_a_worker_comes_at_its_batch():
    class Broken(list):
        def __getitem__(self, row):
            if row == 2:
                raise ValueError("row 2 is broken")
            return super().__getitem__(row)

    loader = DataLoader(Broken(features(4)), num_workers=2)
    loop = iter(loader)
    assert (ids(next(loop)), ids(next(loop))) == ([0], [1])
    with pytest.raises(ValueError, match="row 2 is broken"):
        next(loop)
    assert loader.get_state()["rows"] == 2


def test_threads_end_when_the_loop_is_left():
    for _ in DataLoader(features(50), num_workers=3):
        break
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("twinkle-data")]
    for thread in threads:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads)


def test_a_second_loop_ends_the_first_with_an_error():
    loader = DataLoader(features(4))
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(ModeError, match="was ended by another one. .*build a second loader"):
        next(first)


def test_a_loader_that_nobody_holds_is_forgotten():
    from twinkle_core.dataloader.positions import live_loaders

    kept = DataLoader(features(1))
    DataLoader(features(2))
    gc.collect()
    assert live_loaders() == [kept]


def test_a_handle_is_looped_over_like_the_loader_itself():
    cluster = InProcessCluster.start_session(mesh=DeviceMesh(dp=2))
    loader = DataLoader(features(5), batch_size=2, shuffle=True, seed=1)
    assert [ids(batch) for batch in loader] == [list(b) for b in batches(epoch_order(5, shuffle=True, seed=1, epoch=0), 2)]
    assert len(loader) == 3
    assert loader.get_state()["epoch"] == 1
    assert ("DataLoader", "next_batch") in cluster.calls


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"batch_size": 0}, ArgumentError, r"`DataLoader\(batch_size=0\)`: use an integer >= 1"),
    ({"batch_size": 2.0}, ArgumentError, "use an integer >= 1"),
    ({"num_workers": -1}, ArgumentError, "use an integer >= 0"),
    ({"seed": -1}, ArgumentError, "use an integer >= 0"),
    ({"shuffle": "yes"}, ArgumentError, "use True or False"),
    ({"dataset": "rows.jsonl"}, ArgumentTypeError, "got a str. Pass a `Dataset`, a list of features"),
    ({"dataset": iter([])}, ArgumentTypeError, "with `__len__` and `__getitem__`"),
    ({"batchsize": 2}, UnknownArgumentError, "Did you mean `batch_size`"),
    ({"drop_last": True}, UnknownArgumentError, "has no argument `drop_last`"),
])
def test_a_wrong_argument_is_an_error_that_says_what_is_allowed(options, error, message):
    with pytest.raises(error, match=message):
        DataLoader(**{"dataset": features(3), **options})


@settings(max_examples=20)
@given(rows=st.integers(1, 30), batch_size=st.integers(1, 8), workers=st.integers(0, 2))
def test_batches_hold_every_row_once(rows, batch_size, workers):
    loader = DataLoader(features(rows), batch_size=batch_size, shuffle=True, num_workers=workers)
    for _ in range(2):
        assert sorted(row for batch in loader for row in ids(batch)) == list(range(rows))
