"""What the script sees when a rank fails, dies or hangs, when a cluster is too small, and what is left behind: nothing."""

import os
import signal
import socket
import time

import pytest
from ray_components import Rows

import twinkle
from twinkle import DeviceGroup
from twinkle_core import session
from twinkle_core.errors import ArgumentError, MeshError, ModeError, WorkerError
from twinkle_ray import group as group_module


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that do not answer are given up sooner, so that tests need not wait."""
    monkeypatch.setattr(group_module, "GRACE_S", 0.5)


class OwnError(Exception):
    """An error of the script."""


class Unpicklable(Exception):
    """An error that pickle cannot make again."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def test_an_error_has_its_own_class_the_ranks_traceback_rank_host_and_the_line_of_the_script(start) -> None:
    start(model=2)
    with pytest.raises(OwnError, match="bad rows") as caught:
        Rows().fail(OwnError("bad rows"), on_rank=1)  # this line
    [note] = caught.value.__notes__
    assert f"In `Rows.fail` on rank 1 of group `model` (host {socket.gethostname()}, process " in note
    assert "test_failures.py" in note
    assert '`Rows().fail(OwnError("bad rows"), on_rank=1)  # this line`' in note
    assert "Traceback (most recent call last)" in note
    assert "ray_components.py" in note
    assert "twinkle_ray" not in note


def test_after_an_error_of_all_ranks_the_group_goes_on(start) -> None:
    start(ranks=2)
    rows = Rows()
    with pytest.raises(ValueError, match="once\nIn `Rows.fail` on rank 0 of"):
        rows.fail(ValueError("once"))
    assert rows.double([1, 2]) == [2, 4]


def test_an_error_of_a_constructor_is_raised_and_its_group_goes_on(start) -> None:
    start(ranks=1)
    with pytest.raises(TypeError, match=r"can only concatenate str.*\n?In `Rows\(...\)` on rank 0 of group `ranks`"):
        Rows(start="text")
    assert Rows().double([1]) == [2]


def test_an_error_that_cannot_be_carried_is_a_worker_error_with_its_text(start) -> None:
    start(ranks=1)
    rows = Rows()
    with pytest.raises(WorkerError, match=r"Unpicklable: 1 and 2 \(its class cannot be carried to the script\)"):
        rows.use(_Raises(), "unpicklable")


class _Raises:
    def unpicklable(self) -> None:
        raise Unpicklable(1, 2)

    def __getattr__(self, name: str) -> None:
        raise AttributeError(name)


def test_ranks_that_wait_for_the_one_that_failed_are_released_and_other_groups_go_on(start, short_grace) -> None:
    start(model=2, sampler=1)
    model, sampler = Rows(remote_group="model"), Rows(remote_group="sampler")
    begin = time.monotonic()
    with pytest.raises(OwnError, match="alone"):
        model.fail(OwnError("alone"), on_rank=0, block=True)
    assert time.monotonic() - begin < 15
    with pytest.raises(ModeError, match=r"Group `model` was stopped after a failure: OwnError: alone\n.*rank 0.*--max-restarts"):
        model.count()
    assert sampler.double([1]) == [2]


def test_a_rank_that_dies_in_a_call_is_named_within_15_seconds(start, short_grace) -> None:
    start(model=2)
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=r"The process died"):
        Rows().end(on_rank=1)
    assert time.monotonic() - begin < 15


def test_a_rank_that_was_killed_between_calls_is_named_by_the_next(start, short_grace) -> None:
    start(model=2)
    rows = Rows()
    os.kill(rows.pid()[1], signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=r"The process died") as caught:
        for _ in range(1000):
            rows.count()
    assert "rank 1 of group `model`" in caught.value.__notes__[0]
    assert time.monotonic() - begin < 15


def test_more_ranks_than_there_are_slots_is_an_error_within_seconds_that_names_the_group(start) -> None:
    begin = time.monotonic()
    with pytest.raises(MeshError, match=r"Group `sampler` does not fit: of its 20 ranks there is room for 10. Asked: `model` 2 "
                                        r"rank\(s\) of 1 CPU, `sampler` 20 rank\(s\) of 1 CPU. The cluster has: .* of 12 CPU free. "
                                        r"Shrink it to 10"):
        start(model=2, sampler=20)
    assert time.monotonic() - begin < 10


def test_devices_that_the_cluster_does_not_have_are_an_error_that_says_so(cluster) -> None:
    with pytest.raises(MeshError, match=r"`model` 1 rank\(s\) of 2 GPU. The cluster has: .*0 of 0 GPU free. Leave it out"):
        twinkle.initialize(mode="ray", groups=[DeviceGroup("model", ranks=1, device_type="cuda", gpus_per_worker=2)])
    assert session.active() is None


def test_more_ranks_a_machine_than_nproc_per_node_are_refused(cluster) -> None:
    with pytest.raises(MeshError, match=r"room for 2.*A machine takes 2 ranks at most \(`nproc_per_node`\)"):
        twinkle.initialize(mode="ray", nproc_per_node=2, groups=[DeviceGroup("model", ranks=3, device_type="cpu")])


def test_two_groups_cannot_have_the_same_rank(cluster) -> None:
    groups = [DeviceGroup("a", ranks=[0, 1], device_type="cpu"), DeviceGroup("b", ranks=[1, 2], device_type="cpu")]
    with pytest.raises(ArgumentError, match=r"Rank 1 is in the groups `a` and `b`.*`remote_group='a'`"):
        twinkle.initialize(mode="ray", groups=groups)


@pytest.mark.parametrize(("address", "text"), [
    ("127.0.0.1:1", "is connected to the Ray cluster at `.*` already. Leave `address` out"),
])
def test_another_address_than_that_of_the_connected_cluster_is_refused(cluster, address: str, text: str) -> None:
    with pytest.raises(ModeError, match=text):
        twinkle.initialize(mode="ray", address=address)


def test_the_end_of_a_session_leaves_no_actor_no_placement_group_and_every_slot(start) -> None:
    import ray
    from ray._private import state
    from ray.util.placement_group import placement_group_table

    before = {id for id, actor in state.actors().items() if actor["State"] == "ALIVE"}
    start(a=3, b=2)
    rows = Rows(remote_group="a")
    assert rows.double([1]) == [2]
    session.stop()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and ray.available_resources().get("CPU") != 12:
        pass
    assert ray.available_resources()["CPU"] == 12
    assert {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}
    assert {id for id, actor in state.actors().items() if actor["State"] == "ALIVE"} == before
