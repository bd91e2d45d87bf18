"""Dispatch and collect as pure functions, marks, the metaclass, and handles."""

import inspect
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_core.data_format import SampledSequence, SampleResponse
from twinkle_core.errors import (
    ArgumentError,
    ArgumentTypeError,
    RemoteAttributeError,
    UnknownArgumentError,
)
from twinkle_core.mesh import DeviceMesh
from twinkle_core.remote import RemoteComponent, find_mark, marked_methods, remote_class, remote_function
from twinkle_core.remote.collect import collect
from twinkle_core.remote.dispatch import dispatch, partition, partition_rows
from twinkle_core.testing.launchers import InProcessCluster

MESHES = [
    DeviceMesh(pp=pp, dp=dp, fsdp=fsdp, tp=tp)
    for pp, dp, fsdp, tp in itertools.product((1, 2, 3), (1, 2, 4), (1, 2, 4), (1, 2)) if pp * dp * fsdp * tp <= 32
]
meshes = st.sampled_from(MESHES)
rows = st.lists(st.integers(), max_size=40)


def calls_of(value: Any, mesh: DeviceMesh, how: Any = "slice_dp") -> list[Any]:
    return [args[0] for args, _ in dispatch(how, (value,), {}, mesh)]


@given(mesh=meshes, x=rows)
def test_flatten_of_slice_dp_is_the_identity_in_order(mesh: DeviceMesh, x: list[int]) -> None:
    assert collect("flatten", calls_of(x, mesh), mesh, dispatch="slice_dp") == x


@given(mesh=meshes, x=rows)
def test_flatten_of_slice_is_the_identity_in_order(mesh: DeviceMesh, x: list[int]) -> None:
    assert collect("flatten", calls_of(x, mesh, "slice"), mesh, dispatch="slice") == x


@given(mesh=meshes, x=rows)
def test_flatten_of_slice_dp_is_the_identity_in_nested_dicts(mesh: DeviceMesh, x: list[int]) -> None:
    nested = {"a": x, "b": {"c": [str(i) for i in x]}}
    assert collect("flatten", calls_of(nested, mesh), mesh, dispatch="slice_dp") == nested


@given(mesh=meshes, x=rows)
def test_slice_dp_gives_every_data_rank_the_same_number_of_rows_or_one_less(mesh: DeviceMesh, x: list[int]) -> None:
    lengths = {len(piece) for piece in calls_of(x, mesh)}
    assert max(lengths) - min(lengths) <= 1


@given(mesh=meshes, x=rows)
def test_ranks_that_differ_in_tp_and_pp_only_get_the_same_slice(mesh: DeviceMesh, x: list[int]) -> None:
    pieces = calls_of(x, mesh)
    for rank in range(mesh.world_size):
        assert all(pieces[other] == pieces[rank] for other in mesh.group_of(rank, "pp", "tp"))


@given(mesh=meshes, x=st.lists(st.integers(-100, 100), min_size=1, max_size=40))
def test_sum_after_slice_dp_counts_every_row_once(mesh: DeviceMesh, x: list[int]) -> None:
    partial = [{"total": sum(piece), "n": len(piece)} for piece in calls_of(x, mesh)]
    assert collect("sum", partial, mesh, dispatch="slice_dp") == {"total": sum(x), "n": len(x)}


@given(mesh=meshes)
def test_all_gives_every_rank_everything_and_mean_of_the_same_is_it(mesh: DeviceMesh) -> None:
    calls = dispatch("all", ([1, 2],), {"k": [3]}, mesh)
    assert calls == [(([1, 2],), {"k": [3]})] * mesh.world_size
    assert collect("mean", [{"x": 2.0}] * mesh.world_size, mesh, dispatch="all") == {"x": 2.0}


@given(mesh=meshes)
def test_first_last_pp_and_none_pick_by_rank(mesh: DeviceMesh) -> None:
    ranks = list(range(mesh.world_size))
    assert collect("first", ranks, mesh, dispatch="all") == 0
    assert collect("none", ranks, mesh, dispatch="all") == ranks
    assert collect("last_pp", ranks, mesh, dispatch="all") == mesh.world_size * (mesh.pp - 1) // mesh.pp


def test_fsdp_4_x_dp_2_keeps_the_order() -> None:
    mesh = DeviceMesh.from_sizes(fsdp_size=4, dp_size=2)
    assert collect("flatten", calls_of(list(range(8)), mesh), mesh, dispatch="slice_dp") == [0, 1, 2, 3, 4, 5, 6, 7]


def test_fewer_rows_than_ranks_leaves_some_ranks_an_empty_list() -> None:
    pieces = calls_of(["a", "b"], DeviceMesh.from_sizes(dp_size=4))
    assert sorted(pieces) == [[], [], ["a"], ["b"]]


def test_what_is_not_a_list_goes_to_every_rank() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2)
    assert dispatch("slice_dp", ([1, 2],), {"adapter_name": "a", "n": (1, 2)}, mesh) == [
        (([1],), {"adapter_name": "a", "n": (1, 2)}), (([2],), {"adapter_name": "a", "n": (1, 2)})]


def test_lists_sliced_together_must_have_one_length() -> None:
    with pytest.raises(ArgumentError, match="`advantages` has 3 entries, Argument 0 has 4"):
        dispatch("slice_dp", ([1, 2, 3, 4],), {"advantages": [0.1, 0.2, 0.3]}, DeviceMesh.from_sizes(dp_size=2))


def test_slicing_nothing_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="no argument is a list. Pass the batch as a list"):
        dispatch("slice_dp", (1,), {}, DeviceMesh.from_sizes(dp_size=2))


def response(*tokens: int) -> SampleResponse:
    return SampleResponse(sequences=[
        SampledSequence(tokens=[t], logprobs=[0.0], decoded="", stop_reason="stop", new_input_feature={"input_ids": [t]})
        for t in tokens])


def test_responses_are_flattened_to_one_feature_a_sequence_before_slicing() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2)
    calls = dispatch("slice_dp", (), {"inputs": [response(1, 2), response(3, 4)], "advantages": [1.0, 2.0, 3.0, 4.0]}, mesh)
    assert calls[0][1] == {"inputs": [{"input_ids": [1]}, {"input_ids": [2]}], "advantages": [1.0, 2.0]}
    assert calls[1][1] == {"inputs": [{"input_ids": [3]}, {"input_ids": [4]}], "advantages": [3.0, 4.0]}


@given(pairs=st.lists(st.booleans(), max_size=12), pieces=st.integers(1, 5))
def test_a_preference_pair_is_never_parted(pairs: list[bool], pieces: int) -> None:
    items: list[dict[str, int]] = []
    for number, is_pair in enumerate(pairs):
        items += [{"pair_id": number}] * 2 if is_pair else [{"row_id": number}]
    ranges = partition_rows(items, pieces)
    assert [item for r in ranges for item in items[r.start:r.stop]] == items
    where = [{n for n, r in enumerate(ranges) for item in items[r.start:r.stop] if item.get("pair_id") == pair}
             for pair in range(len(pairs))]
    assert all(len(places) <= 1 for places in where)


@given(length=st.integers(0, 50), pieces=st.integers(1, 9))
def test_partition_covers_in_order_with_lengths_that_differ_by_at_most_one(length: int, pieces: int) -> None:
    ranges = partition(length, pieces)
    assert [i for r in ranges for i in r] == list(range(length))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_a_dispatch_function_gives_one_call_a_rank() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2)
    assert dispatch(lambda args, kwargs, mesh: [((rank,), {}) for rank in range(mesh.world_size)], (), {}, mesh) == [
        ((0,), {}), ((1,), {})]
    with pytest.raises(ArgumentError, match="returned 1 calls for 2 ranks"):
        dispatch(lambda args, kwargs, mesh: [((), {})], (), {}, mesh)


def test_a_collect_function_gets_all_results_and_the_mesh() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2)
    assert collect(lambda results, mesh: (results, mesh.dp), [1, 2], mesh, dispatch="all") == ([1, 2], 2)


def test_ranks_that_return_different_keys_are_an_error() -> None:
    with pytest.raises(ArgumentError, match="different keys: .*'a'.* and .*'b'"):
        collect("flatten", [{"a": [1]}, {"b": [1]}], DeviceMesh.from_sizes(dp_size=2), dispatch="slice_dp")


def test_a_result_is_needed_from_every_rank() -> None:
    with pytest.raises(ArgumentError, match="1 results were collected from 2 ranks"):
        collect("first", [1], DeviceMesh.from_sizes(dp_size=2), dispatch="all")


@pytest.mark.parametrize("bad", [{"dispatch": "slices"}, {"collect": "last"}, {"execute": "rank0"}])
def test_a_mark_that_does_not_exist_lists_those_that_do(bad: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"remote_function\(.*: use one of"):
        remote_function(**bad)


class Counter(RemoteComponent):
    """A component with a marked and an unmarked method."""

    def __init__(self, start: int = 0, *, remote_group: str | None = None, device_mesh: DeviceMesh | None = None) -> None:
        self.value = start

    @remote_function(dispatch="slice_dp", collect="flatten")
    def double(self, inputs: list[int]) -> list[int]:
        self.value += len(inputs)
        return [2 * x for x in inputs]

    @remote_function(collect="none")
    def read(self) -> int:
        return self.value

    def private(self) -> int:
        return self.value


class Named(Counter):
    def double(self, inputs: list[int]) -> list[int]:
        return [3 * x for x in inputs]


def test_the_signature_of_a_component_stays_as_written() -> None:
    assert list(inspect.signature(Counter).parameters) == ["start", "remote_group", "device_mesh"]


def test_a_method_that_overrides_a_marked_one_keeps_its_mark() -> None:
    mark = find_mark(Named, "double")
    assert mark is not None
    assert mark.dispatch == "slice_dp"
    assert marked_methods(Named) == ["double", "read"]


def test_in_local_mode_a_component_is_the_object() -> None:
    counter = Counter(3)
    assert type(counter) is Counter
    assert counter.double([1]) == [2]
    assert counter.private() == 4


def test_a_misspelt_keyword_of_a_constructor_or_method_names_the_near_one() -> None:
    with pytest.raises(UnknownArgumentError, match=r"`Counter` has no argument `strat`. Did you mean `start`"):
        Counter(strat=1)  # type: ignore[call-arg]
    with pytest.raises(UnknownArgumentError, match=r"`Counter.double` has no argument `input`. Did you mean `inputs`"):
        Counter().double(input=[1])  # type: ignore[call-arg]


def test_an_argument_too_many_shows_the_signature() -> None:
    with pytest.raises(ArgumentTypeError, match=r"`Counter\(...\)`: too many positional.* Call it as `Counter\(start: int = 0,"):
        Counter(1, 2)  # type: ignore[call-arg]


@remote_class
class Plain:
    """A class that does not derive from RemoteComponent, with a zero-argument super()."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.value = start

    @remote_function()
    def read(self) -> int:
        return self.value


def test_remote_class_makes_a_component_of_an_ordinary_class() -> None:
    assert Plain(4).read() == 4
    assert Plain.__name__ == "Plain"
    with pytest.raises(UnknownArgumentError, match="Did you mean `start`"):
        Plain(stat=1)  # type: ignore[call-arg]


@pytest.fixture
def cluster() -> InProcessCluster:
    return InProcessCluster.start_session(mesh=DeviceMesh.from_sizes(tp_size=2, dp_size=2))


def test_a_handle_is_an_instance_of_its_class_and_calls_every_rank(cluster: InProcessCluster) -> None:
    counter = Counter(10)
    assert isinstance(counter, Counter)
    assert counter.double([1, 2, 3]) == [2, 4, 6]
    assert counter.read() == [11, 11, 12, 12]


def test_a_handle_shows_the_marked_methods_only(cluster: InProcessCluster) -> None:
    counter = Counter()
    assert dir(counter) == ["double", "read"]
    with pytest.raises(RemoteAttributeError, match=r"`Counter.value` lives on the workers.*marked methods: `double`, `read`"):
        _ = counter.value
    with pytest.raises(RemoteAttributeError, match="`private`|`Counter.private` lives on the workers"):
        counter.private()
    with pytest.raises(RemoteAttributeError, match="`value` cannot be set on a handle"):
        counter.value = 3
    assert not hasattr(counter, "value")


def test_two_components_made_on_one_line_are_two(cluster: InProcessCluster) -> None:
    first, second = (Counter(start) for start in (0, 100))
    assert first.read() != second.read()


def test_misspelt_keywords_are_refused_before_anything_is_sent(cluster: InProcessCluster) -> None:
    with pytest.raises(UnknownArgumentError, match="Did you mean `inputs`"):
        Counter().double(input=[1])  # type: ignore[call-arg]
    assert cluster.calls == []


def test_a_method_that_overrides_a_marked_one_checks_its_keywords_too() -> None:
    class Base(RemoteComponent):
        @remote_function()
        def add(self, amount: int = 1) -> int:
            return amount

    class Derived(Base):
        def add(self, amount: int = 1) -> int:
            return 2 * amount

    assert Derived().add(amount=2) == 4
    with pytest.raises(UnknownArgumentError, match=r"`Derived.add` has no argument `amuont`. Did you mean `amount`"):
        Derived().add(amuont=2)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
