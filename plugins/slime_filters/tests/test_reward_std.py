import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.testing import make_group, make_sample
from slime_filters.reward_std import over_sampling_filter, reward_std


def test_the_group_that_differs_most_comes_first():
    same, mild, wide = make_group([1.0, 1.0]), make_group([0.4, 0.6]), make_group([0.0, 1.0])
    assert over_sampling_filter([same, mild, wide]) == [wide, mild, same]


def test_groups_of_unequal_size_are_compared():
    one_of_four, one_of_two = make_group([1.0, 0.0, 0.0, 0.0]), make_group([1.0, 0.0])
    assert over_sampling_filter([one_of_four, one_of_two]) == [one_of_two, one_of_four]


def test_a_group_without_rewards_comes_last():
    failed, same = make_group([None, None]), make_group([1.0, 1.0])
    assert over_sampling_filter([failed, same]) == [same, failed]


def test_samples_of_one_fan_out_count_once():
    fanned = [make_sample(reward=1.0, rollout_index=0) for _ in range(3)]
    assert reward_std([*fanned, make_sample(reward=0.0, rollout_index=1)]) == pytest.approx(0.5)


def test_samples_without_a_rollout_index_count_each():
    assert reward_std([make_sample(reward=reward) for reward in (1.0, 0.0)]) == pytest.approx(0.5)


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4), max_size=8))
def test_it_orders_all_groups_and_keeps_the_order_of_equals(rewards: list[list[float]]):
    groups = [make_group(r, group_index=i) for i, r in enumerate(rewards)]
    ranked = over_sampling_filter(groups)
    keys = [(-reward_std(group), group[0].group_index) for group in ranked]
    assert keys == sorted(keys)
    assert len(ranked) == len(groups)
