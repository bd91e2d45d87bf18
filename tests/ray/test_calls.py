"""Calls through handles on Ray: what ranks get, what the script gets back, what components on one group share."""

import os

import pytest
from ray_components import Blob, Rows

from twinkle_core import session
from twinkle_core.errors import ArgumentError, MeshError, RemoteAttributeError
from twinkle_core.mesh import DeviceMesh
from twinkle_core.remote import remote_class, remote_function


def test_rows_are_cut_among_the_ranks_and_come_back_in_order(start) -> None:
    start(ranks=3)
    rows = Rows()
    assert rows.double(list(range(7))) == [0, 2, 4, 6, 8, 10, 12]
    assert rows.double([1, 2], weights=[5, 6]) == [5, 12]
    assert rows.count() == 9


def test_ranks_have_what_torchrun_would_have_given_them_before_torch_is_imported(start, monkeypatch) -> None:
    monkeypatch.setenv("TWINKLE_LAUNCH", "{}")
    start(a=2, b=1)
    first, second = Rows(remote_group="a"), Rows(remote_group="b")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TWINKLE_LAUNCH")
    found = first.variables(*names)
    assert [list(values.values()) for values in found] == [["0", "0", "2", "1", "", None], ["1", "1", "2", "1", "", None]]
    assert list(second.variables(*names)[0].values()) == ["0", "0", "1", "1", "", None]
    ports = {first.variables("MASTER_PORT")[0]["MASTER_PORT"], second.variables("MASTER_PORT")[0]["MASTER_PORT"]}
    assert len(ports) == 2


def test_components_made_in_a_loop_on_one_line_are_different_and_share_the_processes_of_their_group(start) -> None:
    start(ranks=2)
    made = [Rows(start=n) for n in (10, 20)]
    assert [rows.count() for rows in made] == [20, 40]
    assert made[0].pid() == made[1].pid()
    assert os.getpid() not in made[0].pid()


def test_a_handle_is_an_instance_and_shows_marked_methods_only(start) -> None:
    start(ranks=1)
    rows = Rows()
    assert isinstance(rows, Rows)
    with pytest.raises(RemoteAttributeError, match=r"`Rows.total` lives on the workers"):
        rows.total  # noqa: B018


def test_a_class_of_the_script_itself_travels_with_its_functions(start) -> None:
    start(ranks=2)
    offset = 5

    @remote_class
    class Adder:
        @remote_function(dispatch="slice", collect="flatten")
        def add(self, numbers: list[int], function) -> list[int]:
            return [function(number) for number in numbers]

    assert Adder().add([1, 2, 3], lambda number: number + offset) == [6, 7, 8]


def test_without_a_name_a_component_goes_to_the_only_group_and_with_several_it_must_say_one(start) -> None:
    start(model=1, sampler=1)
    with pytest.raises(ArgumentError, match=r"`Rows\(...\)` does not say where it lives.*`model`, `sampler`.*remote_group='model'"):
        Rows()
    with pytest.raises(ArgumentError, match=r"`remote_group='modle'` is not a group of this run. Did you mean `model`"):
        Rows(remote_group="modle")


def test_a_mesh_of_another_size_than_the_group_is_refused(start) -> None:
    start(model=2)
    with pytest.raises(MeshError, match=r"has 4 ranks, but group `model` has 2"):
        Rows(device_mesh=DeviceMesh.from_sizes(dp_size=4))
    session.stop()
    with pytest.raises(MeshError, match=r"has 3 ranks, but no group has so many: `model` 2"):
        start(model=2, mesh=DeviceMesh.from_sizes(dp_size=3))


def test_ranks_that_differ_in_tp_only_get_the_same_rows(start) -> None:
    start(ranks=4, mesh=DeviceMesh.from_sizes(dp_size=2, tp_size=2))
    assert Rows().received([1, 2, 3]) == [[1], [1], [2, 3], [2, 3]]


def test_a_handle_passed_to_a_component_of_its_group_is_the_object_and_elsewhere_a_handle(start) -> None:
    start(a=1, b=1)
    here, there = Rows(start=7, remote_group="a"), Rows(remote_group="b")
    assert here.is_same(here)
    assert not there.is_same(here)
    assert there.use(here, "count") == 7


def test_the_values_of_ranks_that_collect_does_not_look_at_stay_there(start) -> None:
    start(ranks=2, mesh=DeviceMesh.from_sizes(tp_size=2))
    [blob] = Rows().blobs([1])
    assert isinstance(blob, Blob)
    assert blob.seen == (os.getpid(),)
