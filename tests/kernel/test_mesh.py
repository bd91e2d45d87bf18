"""Every mesh up to 64 ranks: each rank in one place, groups that partition, and errors that print every factor."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_core.dataloader.order import slice_of
from twinkle_core.errors import ArgumentError, ArgumentTypeError, MeshError
from twinkle_core.mesh import AXES, DeviceGroup, DeviceMesh

WORLD = 64
MESHES = [DeviceMesh(pp=pp, dp=dp, fsdp=fsdp, tp=tp) for pp in range(1, WORLD + 1) for dp in range(1, WORLD // pp + 1)
          for fsdp in range(1, WORLD // (pp * dp) + 1) for tp in range(1, WORLD // (pp * dp * fsdp) + 1)]
"""All of them."""
meshes = st.sampled_from(MESHES)


def test_every_rank_of_every_mesh_stands_in_one_place() -> None:
    for mesh in MESHES:
        places = [tuple(mesh.coordinates(rank).values()) for rank in range(mesh.world_size)]
        assert len(set(places)) == mesh.world_size
        assert [mesh.rank(**mesh.coordinates(rank)) for rank in range(mesh.world_size)] == list(range(mesh.world_size))


def test_every_slice_of_the_data_is_seen_by_one_column_of_ranks_in_order_on_every_mesh() -> None:
    for mesh in MESHES:
        slices = [mesh.data_rank(rank) for rank in range(mesh.world_size)]
        assert Counter(slices) == dict.fromkeys(range(mesh.data_world_size), mesh.pp * mesh.tp)
        for stage, part in itertools.product(range(mesh.pp), range(mesh.tp)):
            replicas = mesh.group_of(mesh.rank(pp=stage, tp=part), "dp", "fsdp")
            assert replicas == sorted(replicas)
            assert [slices[rank] for rank in replicas] == list(range(mesh.data_world_size))


@pytest.mark.parametrize("rows", [0, 1, 7, 64, 100])
def test_the_slices_of_a_batch_are_disjoint_complete_and_in_order(rows: int) -> None:
    batch = list(range(rows))
    for size in range(1, WORLD + 1):
        slices = [slice_of(batch, data_rank, size) for data_rank in range(size)]
        assert [row for part in slices for row in part] == batch
        assert max(map(len, slices)) - min(map(len, slices)) <= 1


def test_pp_is_outermost_and_tp_innermost() -> None:
    mesh = DeviceMesh.from_sizes(pp_size=2, dp_size=2, fsdp_size=2, tp_size=2)
    assert mesh.coordinates(0) == dict(pp=0, dp=0, fsdp=0, cp=0, ep=0, tp=0)
    assert mesh.coordinates(1) == dict(pp=0, dp=0, fsdp=0, cp=0, ep=0, tp=1)
    assert mesh.coordinates(2) == dict(pp=0, dp=0, fsdp=1, cp=0, ep=0, tp=0)
    assert mesh.coordinates(4) == dict(pp=0, dp=1, fsdp=0, cp=0, ep=0, tp=0)
    assert mesh.coordinates(8) == dict(pp=1, dp=0, fsdp=0, cp=0, ep=0, tp=0)


def test_data_ranks_are_the_dp_and_fsdp_coordinates_in_that_order() -> None:
    mesh = DeviceMesh.from_sizes(fsdp_size=4, dp_size=2)
    assert [mesh.data_rank(rank) for rank in range(8)] == [0, 1, 2, 3, 4, 5, 6, 7]
    mesh = DeviceMesh.from_sizes(tp_size=2, pp_size=2, dp_size=2)
    assert [mesh.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


@given(mesh=meshes, axes=st.sets(st.sampled_from(["pp", "dp", "fsdp", "tp"])))
def test_the_groups_of_any_axes_partition_the_ranks(mesh: DeviceMesh, axes: set[str]) -> None:
    groups = {tuple(mesh.group_of(rank, *axes)) for rank in range(mesh.world_size)}
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    size = 1
    for axis in axes:
        size *= getattr(mesh, axis)
    assert {len(group) for group in groups} == {size}


@given(mesh=meshes)
def test_there_is_one_representative_for_each_slice_of_the_data_in_order(mesh: DeviceMesh) -> None:
    ranks = mesh.data_representatives()
    assert [mesh.data_rank(rank) for rank in ranks] == list(range(mesh.data_world_size))
    assert all(mesh.is_last_stage(rank) for rank in ranks)


@given(mesh=meshes)
def test_parse_reads_what_str_writes(mesh: DeviceMesh) -> None:
    assert DeviceMesh.parse(str(mesh)) == mesh


def test_only_a_world_size_means_data_parallel() -> None:
    assert DeviceMesh.from_sizes(world_size=4) == DeviceMesh.from_sizes(dp_size=4)


def test_a_world_size_left_out_is_the_product_without_vpp() -> None:
    mesh = DeviceMesh.from_sizes(pp_size=2, tp_size=3, vpp_size=2)
    assert mesh.world_size == 6


def test_a_world_size_that_differs_prints_every_factor() -> None:
    with pytest.raises(MeshError, match=r"`world_size=8` .* pp 1 x dp 3 x fsdp 2 x cp 1 x ep 1 x tp 1 = 6"):
        DeviceMesh.from_sizes(world_size=8, dp_size=3, fsdp_size=2)


def test_a_mesh_that_does_not_fit_the_processes_says_both_numbers_and_what_to_do() -> None:
    with pytest.raises(MeshError, match=r"has 2 ranks, but torchrun has 3\. Start 2 processes, or choose sizes whose product is 3"):
        DeviceMesh.from_sizes(tp_size=2).check_world_size(3, where="torchrun")


@pytest.mark.parametrize("axis", ["cp", "ep"])
def test_axes_that_are_not_built_are_refused_by_name(axis: str) -> None:
    with pytest.raises(MeshError, match=rf"`{axis}_size=2`.*\(`{axis}`\) is not built yet. Leave `{axis}_size` out"):
        DeviceMesh.from_sizes(**{f"{axis}_size": 2})


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
def test_a_size_is_an_integer_of_at_least_one(size: object) -> None:
    with pytest.raises(MeshError, match=r"`dp_size=.*` is not a size. Use an integer >= 1"):
        DeviceMesh.from_sizes(dp_size=size)  # type: ignore[arg-type]


def test_vpp_needs_pp() -> None:
    with pytest.raises(MeshError, match="`vpp_size=2` needs `pp_size` > 1"):
        DeviceMesh.from_sizes(vpp_size=2)


@pytest.mark.parametrize(("text", "advice"), [
    ("fsdp:4", "not of the form axis=size"),
    ("fsdp=x", "not of the form axis=size"),
    ("fdsp=4", "Did you mean `fsdp`"),
    ("dp=2,dp=2", "`dp` stands twice.*Give each axis one size"),
    ("", "not of the form axis=size"),
    ("dp=2;tp=2", "not of the form axis=size, as in `fsdp=4,dp=2`"),
    ("dp=-2", "not of the form axis=size"),
    ("dp=0", "`dp_size=0` is not a size. Use an integer >= 1"),
    ("dp=²", "not of the form axis=size"),
    ("vpp=2", "needs `pp_size` > 1"),
    ("cp=2", "is not built yet"),
])
def test_a_mesh_that_cannot_be_read_says_why(text: str, advice: str) -> None:
    with pytest.raises(MeshError, match=advice):
        DeviceMesh.parse(text)


def test_coordinates_outside_the_mesh_are_refused() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2)
    with pytest.raises(MeshError, match="`rank=2` is outside the mesh .* Use 0 to 1"):
        mesh.coordinates(2)
    with pytest.raises(MeshError, match="`dp=2` is outside the mesh"):
        mesh.rank(dp=2)
    with pytest.raises(MeshError, match=r"`fdsp` is not an axis. Did you mean `fsdp`"):
        mesh.rank(fdsp=0)


def test_a_group_counts_its_ranks() -> None:
    assert DeviceGroup("model", 4, "cpu").world_size == 4
    assert DeviceGroup(name="model", ranks=[2, 5], device_type="cuda").world_size == 2


@pytest.mark.parametrize("ranks", [0, -1, [], [1, 1], [-1]])
def test_a_group_needs_different_ranks(ranks: int | list[int]) -> None:
    with pytest.raises(ArgumentError, match="rank"):
        DeviceGroup("model", ranks, "cpu")


def test_a_group_needs_a_name_and_a_device() -> None:
    with pytest.raises(ArgumentError, match="give the group a name"):
        DeviceGroup("", 1, "cpu")
    with pytest.raises(ArgumentError, match="gpus_per_worker=0"):
        DeviceGroup("model", 1, "cuda", gpus_per_worker=0)


@pytest.mark.parametrize("fields", [
    {"name": 3}, {"ranks": "2"}, {"ranks": True}, {"ranks": [0, "1"]}, {"ranks": None}, {"device_type": None},
    {"gpus_per_worker": 1.0},
])
def test_a_group_of_wrong_types_says_what_each_field_is(fields: dict) -> None:
    with pytest.raises(ArgumentTypeError, match="`ranks` is a count or a list of rank numbers.* Write it as in `DeviceGroup"):
        DeviceGroup(**{"name": "model", "ranks": 1, "device_type": "cpu", **fields})


def test_axes_are_in_the_documented_order() -> None:
    assert AXES == ("pp", "dp", "fsdp", "cp", "ep", "tp")
