import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core import Drop
from slime_core.testing import make_group, make_options
from slime_filters.nonzero_std import dynamic_filter


@pytest.fixture(scope="module")
def args():
    return make_options("--dynamic-filter", "nonzero_std")


def test_different_rewards_are_kept(args):
    assert dynamic_filter(args, make_group([0.0, 1.0])) is None


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([0.0] * 8, "zero_std_0"),
        ([1.0] * 8, "zero_std_1"),
        ([0.5], "zero_std_0.5"),
        ([-0.01, -0.01], "zero_std_0"),
        ([0.1 + 0.2, 0.3], "zero_std_0.3"),
        ([None, 1.0], "zero_std_1"),
    ],
)
def test_equal_rewards_are_dropped_under_a_reason_that_tells_the_reward(args, rewards, reason):
    assert dynamic_filter(args, make_group(rewards)) == Drop(reason)


@pytest.mark.parametrize("rewards", [[], [None, None]])
def test_a_group_without_a_reward_is_dropped(args, rewards):
    assert dynamic_filter(args, make_group(rewards)) == Drop("no_reward")


def test_the_spare_flag_keeps_dropped_groups_in_reserve():
    args = make_options("--dynamic-filter", "nonzero_std", "--nonzero-std-spare")
    assert dynamic_filter(args, make_group([1.0, 1.0])) == Drop("zero_std_1", spare=True)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=9))
def test_a_group_is_kept_exactly_when_two_rewards_differ(args, rewards: list[int]):
    kept = dynamic_filter(args, make_group([float(r) for r in rewards])) is None
    assert kept == (len(set(rewards)) > 1)
