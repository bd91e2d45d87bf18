"""`lazy_collect=True`: results stay on the ranks until looked at, and go from rank to rank where they are passed on."""

import copy
import os
import pickle

import pytest
from ray_components import Rows

from twinkle_core import session
from twinkle_core.errors import ArgumentError
from twinkle_core.mesh import DeviceMesh
from twinkle_ray import group as group_module
from twinkle_ray.lazy import LazyResult


class Fetched:
    """Counts what the driver gets from the ranks as values."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        self._get = group_module.ray.get
        monkeypatch.setattr(group_module.ray, "get", self)

    def __call__(self, refs, **options):
        values = self._get(refs, **options)
        self.bytes += len(pickle.dumps(values))
        return values


def test_a_lazy_result_behaves_as_the_plain_value_once_it_is_looked_at(start) -> None:
    start(ranks=2, lazy_collect=True)
    rows = Rows()
    found = rows.double([1, 2, 3])
    assert type(found) is LazyResult
    assert found == [2, 4, 6]
    assert isinstance(found, list)
    assert (len(found), found[1], list(found), [*found, 1], 4 in found) == (3, 4, [2, 4, 6], [2, 4, 6, 1], True)
    assert copy.copy(found) == [2, 4, 6]
    number = rows.count()
    assert (number + 1, 1 + number, float(number), f"{number:.1f}", number / 2, bool(number)) == (4, 4, 3.0, "3.0", 1.5, True)
    assert number < 4 <= number + 1


def test_pieces_that_agree_go_from_rank_to_rank_and_the_driver_gets_none_of_their_bytes(
        start, monkeypatch: pytest.MonkeyPatch) -> None:
    start(a=2, b=2, lazy_collect=True)
    source, target = Rows(remote_group="a"), Rows(remote_group="b")
    fetched = Fetched(monkeypatch)
    blobs = source.blobs([1, 2, 3])
    received = target.received(blobs)
    target.count() + 0  # waits for the ranks
    assert fetched.bytes < 20_000
    per_rank = [[blob.seen[:1] for blob in rows] for rows in received]
    pids = target.pid()
    assert per_rank == [[(pids[0],)], [(pids[1],), (pids[1],)]]
    assert fetched.bytes > 9_000_000


@pytest.mark.parametrize(("ranks", "expected"), [(1, [[2, 4, 6, 8, 10]]), (3, [[2], [4, 6], [8, 10]])])
def test_pieces_that_do_not_agree_are_joined_and_cut_on_the_ranks(start, monkeypatch, ranks: int, expected: list) -> None:
    start(a=2, b=ranks, lazy_collect=True)
    source, target = Rows(remote_group="a"), Rows(remote_group="b")
    found = target.received(source.double([1, 2, 3, 4, 5]))
    assert found == expected


def test_what_is_cut_beside_a_lazy_result_is_cut_at_its_pieces(start) -> None:
    start(a=2, b=2, lazy_collect=True)
    source, target = Rows(remote_group="a"), Rows(remote_group="b")
    lazy = source.double([1, 2, 3])
    assert target.received(lazy, more=[7, 8, 9]) == [([2], {"more": [7]}), ([4, 6], {"more": [8, 9]})]
    assert target.received(lazy, again=source.double([4, 5, 6])) == [([2], {"again": [8]}), ([4, 6], {"again": [10, 12]})]
    with pytest.raises(ArgumentError, match=r"`more` has 2 entries, what another component returned has 3"):
        target.received(lazy, more=[7, 8])


def test_the_result_of_one_rank_is_cut_for_a_mesh_whose_peers_get_the_same(start) -> None:
    start(a=1, b=4, lazy_collect=True)
    source = Rows(remote_group="a")
    target = Rows(remote_group="b", device_mesh=DeviceMesh.from_sizes(dp_size=2, tp_size=2))
    assert target.received(source.make(3)) == [[0], [0], [1, 2], [1, 2]]


def test_a_mark_decides_for_its_method(start) -> None:
    start(ranks=1)
    rows = Rows()
    lazy = rows.lazy({"a": [1]})
    assert type(lazy) is LazyResult
    assert type(rows.lazy(lazy)) is LazyResult
    assert rows.lazy(lazy) == {"a": [1]}
    assert type(rows.double([1])) is list


def test_a_failure_that_nobody_looked_at_is_raised_by_the_next_look_and_stops_what_came_after(start) -> None:
    start(ranks=2, lazy_collect=True)
    rows = Rows()
    rows.fail(ValueError("unseen"))
    with pytest.raises(ValueError, match="unseen"):
        rows.double([1, 2]) == [2, 4]  # noqa: B015
    assert rows.count() == 0
    assert rows.double([1, 2]) == [2, 4]


def test_a_failed_argument_fails_the_call_that_it_is_passed_to_with_its_own_error(start) -> None:
    start(a=1, b=1, lazy_collect=True)
    source, target = Rows(remote_group="a"), Rows(remote_group="b")
    with pytest.raises(KeyError, match="source"):
        print(target.received(source.fail(KeyError("source"))))
    assert os.getpid() > 0


def test_a_failure_is_cleared_on_every_rank_though_the_next_call_runs_on_the_first_only(start) -> None:
    start(ranks=2, lazy_collect=True)
    rows = Rows()
    with pytest.raises(ValueError, match="both"):
        print(rows.fail(ValueError("both")))
    assert rows.make(2) == [0, 1]
    assert rows.double([1, 2]) == [2, 4]


def test_errors_come_in_the_order_of_the_calls(start) -> None:
    start(ranks=1, lazy_collect=True)
    rows = Rows()
    rows.double([1])
    first = rows.fail(ValueError("first"))
    second = rows.fail(ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        print(second)
    with pytest.raises(ValueError, match="first"):
        print(first)


def test_the_end_of_a_session_waits_for_what_nobody_looked_at_and_raises_what_failed(start) -> None:
    start(ranks=1, lazy_collect=True)
    Rows().fail(ValueError("at the end"))
    with pytest.raises(ValueError, match="at the end"):
        session.stop()
