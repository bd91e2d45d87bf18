"""Which machine a rank goes to, as arithmetic, and the drawing of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray_components import Rows

import twinkle
from twinkle import DeviceGroup, DeviceMesh
from twinkle_ray.cluster import Node, ShortageError, assign, resources


def nodes(*cpus: int, gpus: int = 0) -> list[Node]:
    has = [{"CPU": float(count), "GPU": float(gpus)} for count in cpus]
    return [Node(id=f"n{index}", address="", total=dict(one), free=dict(one)) for index, one in enumerate(has)]


def cpu(name: str, ranks: int) -> DeviceGroup:
    return DeviceGroup(name, ranks=ranks, device_type="cpu")


@given(capacities=st.lists(st.integers(0, 6), min_size=1, max_size=5), sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
       most=st.none() | st.integers(1, 4))
def test_no_machine_gets_more_than_it_has_or_may_take_and_a_shortage_is_real(capacities, sizes, most) -> None:
    groups = [cpu(f"g{index}", size) for index, size in enumerate(sizes)]
    room = sum(min(capacity, most or capacity) for capacity in capacities)
    try:
        placed = assign(groups, nodes(*capacities), nproc_per_node=most)
    except ShortageError as shortage:
        assert sum(sizes) > room
        assert 0 <= shortage.room < shortage.group.world_size
        return
    assert {name: len(where) for name, where in placed.items()} == {group.name: group.world_size for group in groups}
    for index, capacity in enumerate(capacities):
        taken = sum(where.count(f"n{index}") for where in placed.values())
        assert taken <= min(capacity, most or capacity)


def test_a_group_goes_whole_on_the_machine_where_it_leaves_least_room() -> None:
    assert assign([cpu("a", 2), cpu("b", 4)], nodes(6, 2, 4), nproc_per_node=None) == {"a": ["n1"] * 2, "b": ["n2"] * 4}


def test_a_group_that_fits_on_no_machine_is_packed_on_as_few_as_can_be_in_the_order_of_its_ranks() -> None:
    assert assign([cpu("a", 5)], nodes(1, 3, 3), nproc_per_node=None) == {"a": ["n1"] * 3 + ["n2"] * 2}


def test_a_rank_of_a_device_group_takes_its_devices_and_no_cpu() -> None:
    group = DeviceGroup("model", ranks=2, device_type="cuda", gpus_per_worker=2)
    assert resources(group) == {"GPU": 2}
    assert assign([group], nodes(0, 0, gpus=3), nproc_per_node=None) == {"model": ["n0", "n1"]}
    assert resources(DeviceGroup("model", ranks=1, device_type="npu")) == {"NPU": 1}


def test_the_drawing_shows_groups_ranks_machines_meshes_and_what_lives_where(start) -> None:
    start(model=4, sampler=1)
    model = Rows(remote_group="model", device_mesh=DeviceMesh.from_sizes(dp_size=2, tp_size=2))
    pids = model.pid()
    lines = twinkle.get_device_placement().splitlines()
    assert lines[1] == "group model: 4 rank(s) on cpu"
    assert [f"process {pid}" in line and f"rank {rank}: node " in line
            for rank, (pid, line) in enumerate(zip(pids, lines[2:6], strict=True))] == [True] * 4
    assert lines[6] == ("  Rows (number 1): mesh dp=2,tp=2; 0: dp 0 tp 0, 1: dp 0 tp 1, 2: dp 1 tp 0, 3: dp 1 tp 1")
    assert lines[7] == "group sampler: 1 rank(s) on cpu"
    assert lines[9] == "  no component yet"


def test_a_component_that_nobody_holds_any_more_is_dropped_on_its_ranks(start) -> None:
    start(ranks=1)
    keeper, other = Rows(), Rows()
    assert "number 2" in twinkle.get_device_placement()
    del other
    assert "number 2" not in twinkle.get_device_placement()
    assert keeper.double([1]) == [2]


def test_in_one_process_the_drawing_says_so() -> None:
    twinkle.initialize()
    assert twinkle.get_device_placement() == (
        "This process: rank 0 of 1, number 0 on its machine. Everything lives in it.")


def test_without_groups_there_is_one_with_nproc_per_node_ranks(cluster) -> None:
    twinkle.initialize(mode="ray", nproc_per_node=2)
    assert len(Rows().pid()) == 2


@pytest.mark.parametrize("options", [{"max_restarts": 1}, {"submit": True}])
def test_options_that_start_the_script_come_too_late_in_it(cluster, options) -> None:
    with pytest.raises(twinkle_error(), match=r"comes too late: the script runs already. Say `--(max-restarts|submit)`"):
        twinkle.initialize(mode="ray", **options)


def twinkle_error() -> type[Exception]:
    from twinkle_core.errors import ModeError

    return ModeError
