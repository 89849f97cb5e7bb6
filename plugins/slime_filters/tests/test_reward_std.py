import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.testing import make_group, make_options, make_sample
from slime_filters.reward_std import over_sampling_filter, reward_std


@pytest.fixture(scope="module")
def args():
    return make_options("--over-sampling-filter", "reward_std")


def test_the_group_that_differs_most_comes_first(args):
    same, mild, wide = make_group([1.0, 1.0]), make_group([0.4, 0.6]), make_group([0.0, 1.0])
    assert over_sampling_filter(args, [same, mild, wide]) == [wide, mild, same]


def test_groups_of_unequal_size_are_compared(args):
    one_of_four, one_of_two = make_group([1.0, 0.0, 0.0, 0.0]), make_group([1.0, 0.0])
    assert over_sampling_filter(args, [one_of_four, one_of_two]) == [one_of_two, one_of_four]


def test_a_group_without_rewards_comes_last(args):
    failed, same = make_group([None, None]), make_group([1.0, 1.0])
    assert over_sampling_filter(args, [failed, same]) == [same, failed]


def test_samples_of_one_fan_out_count_once():
    fanned = [make_sample(reward=1.0, rollout_index=0) for _ in range(3)]
    assert reward_std([*fanned, make_sample(reward=0.0, rollout_index=1)]) == pytest.approx(0.5)


def test_samples_without_a_rollout_index_count_each():
    assert reward_std([make_sample(reward=reward) for reward in (1.0, 0.0)]) == pytest.approx(0.5)


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4), max_size=8))
def test_it_orders_all_groups_and_keeps_the_order_of_equals(args, rewards: list[list[float]]):
    groups = [make_group(r, group_index=i) for i, r in enumerate(rewards)]
    ranked = over_sampling_filter(args, groups)
    keys = [(-reward_std(group), group[0].group_index) for group in ranked]
    assert keys == sorted(keys)
    assert len(ranked) == len(groups)


def test_one_named_reward_may_decide():
    args = make_options("--over-sampling-filter", "reward_std", "--reward-std-reward", "math")
    loud = [make_sample(reward=r, rewards={"math": 1.0}) for r in (0.0, 9.0)]
    split = [make_sample(reward=1.0, rewards={"math": r}) for r in (0.0, 1.0)]
    assert over_sampling_filter(args, [loud, split]) == [split, loud]
