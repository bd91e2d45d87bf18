"""Advantages relative to a group: by hand, by property, and what is refused."""

import statistics
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.advantage import GRPOAdvantage, RLOOAdvantage
from twinkle_core.errors import ArgumentError, DataError, UnknownArgumentError

REWARDS = [1.0, 0.0, 0.0, 3.0, 5.0, 5.0, 5.0, 5.0]


def test_grpo_is_the_distance_from_the_groups_mean_in_standard_deviations():
    deviation = statistics.pstdev(REWARDS[:4])
    assert GRPOAdvantage()(REWARDS, num_generations=4) == pytest.approx(
        [0, -1 / deviation, -1 / deviation, 2 / deviation, 0, 0, 0, 0])


def test_a_batch_scale_divides_every_group_by_one_number():
    deviation = statistics.pstdev(REWARDS)
    assert GRPOAdvantage(scale="batch")(REWARDS, num_generations=4) == pytest.approx(
        [0, -1 / deviation, -1 / deviation, 2 / deviation, 0, 0, 0, 0])


def test_no_scale_leaves_the_distance():
    assert GRPOAdvantage(scale="none")(REWARDS, num_generations=4) == [0, -1, -1, 2, 0, 0, 0, 0]


def test_rloo_is_the_distance_from_the_mean_of_the_others():
    others = [(sum(REWARDS[:4]) - reward) / 3 for reward in REWARDS[:4]]
    expected = [reward - other for reward, other in zip(REWARDS[:4], others, strict=True)]
    assert RLOOAdvantage()(REWARDS, num_generations=4) == pytest.approx([*expected, 0, 0, 0, 0])


@pytest.mark.parametrize("advantage", [GRPOAdvantage(), GRPOAdvantage("batch"), GRPOAdvantage("none"), RLOOAdvantage()])
def test_equal_rewards_give_exactly_0_also_if_rounding_tells_them_apart(advantage):
    assert advantage([0.1 + 0.2, 0.3, 0.3, 1.0, 1.0, 1.0], num_generations=3) == [0.0] * 6
    assert advantage([0.0] * 4, num_generations=2) == [0.0] * 4


def test_a_group_of_one_has_nothing_to_compare_with():
    assert GRPOAdvantage()([1.0, 2.0], num_generations=1) == [0.0, 0.0]
    with pytest.raises(ArgumentError, match="`num_generations=1`: use an integer >= 2"):
        RLOOAdvantage()([1.0, 2.0], num_generations=1)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 5).flatmap(lambda n: st.tuples(st.just(n), st.lists(
    st.lists(st.integers(-50, 50), min_size=n, max_size=n), max_size=4))))
def test_advantages_of_a_group_sum_to_0_and_keep_its_order(case):
    count, groups = case
    flat = [float(reward) for group in groups for reward in group]
    for advantage in (GRPOAdvantage(), GRPOAdvantage("batch"), GRPOAdvantage("none"), RLOOAdvantage()):
        found = advantage(flat, num_generations=count)
        assert all(isinstance(number, float) for number in found)
        for index, group in enumerate(groups):
            part = found[index * count:(index + 1) * count]
            assert sum(part) == pytest.approx(0, abs=1e-9)
            assert sorted(range(count), key=lambda i: (part[i], i)) == sorted(range(count), key=lambda i: (group[i], i))


@pytest.mark.parametrize(("rewards", "text"), [
    ([1.0] * 7, "`rewards` has 7 entries, which `num_generations=4` does not divide. Pass the rewards of whole groups"),
    ([1.0, float("nan"), 1.0, 1.0], r"`rewards\[1\]` is nan. Rewards are finite numbers"),
    ([[1.0, 2.0], [3.0, 4.0]], r"`rewards` has the shape \(2, 2\). Pass one list"),
    ([1.0, None, "x", 2.0], "holds something that is no number"),
])
def test_rewards_that_are_no_groups_of_numbers_are_refused(rewards, text):
    with pytest.raises(DataError, match=text):
        GRPOAdvantage()(rewards, num_generations=4)


def test_arguments_that_make_no_sense_are_refused():
    with pytest.raises(ArgumentError, match="`num_generations=0`: use an integer >= 1"):
        GRPOAdvantage()([1.0], num_generations=0)
    with pytest.raises(ArgumentError, match="`scale='groups'`: use one of .* Did you mean `group`"):
        GRPOAdvantage(scale="groups")
    with pytest.raises(UnknownArgumentError, match="no argument `scales`. Did you mean `scale`"):
        GRPOAdvantage(scales="group")


def test_it_needs_no_torch():
    script = ("import sys; sys.modules['torch'] = None; from twinkle.advantage import GRPOAdvantage;"
              "print(GRPOAdvantage()([0, 1], num_generations=2), 'transformers' in sys.modules)")
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.stdout == "[-1.0, 1.0] False\n", run.stderr
