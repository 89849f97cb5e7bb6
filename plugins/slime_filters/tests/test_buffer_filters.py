import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core import Status
from slime_core.testing import make_group, make_options, make_sample
from slime_filters import highest_reward, stale_first


@functools.cache
def options(name, *flags):
    return make_options("--buffer-filter", name, *flags)


def made_by(*versions: int):
    """One sample whose response tokens were made by these weight versions; -1 for a token that no engine made."""
    sample = make_sample(status=Status.ABORTED)
    for version in versions:
        sample.append([1], text="x", logprobs=[-1.0], weight_version=version)
    return sample


def test_the_group_with_the_oldest_token_is_taken_first():
    new, old, mixed = [made_by(5, 5)], [made_by(3, 3)], [made_by(4, 4), made_by(2, 9)]
    assert stale_first.buffer_filter(options("stale_first"), [new, old, mixed], 2) == [mixed, old]


def test_the_mean_version_may_decide():
    args = options("stale_first", "--stale-first-by", "mean")
    old, mixed = [made_by(3, 3)], [made_by(2, 9)]
    assert stale_first.buffer_filter(args, [mixed, old], 2) == [old, mixed]


def test_fresh_prompts_come_behind_partial_groups_in_their_order():
    fresh, also_fresh, partial = [made_by()], [made_by(), made_by()], [made_by(), made_by(7)]
    taken = stale_first.buffer_filter(options("stale_first"), [fresh, also_fresh, partial], 3)
    assert taken == [partial, fresh, also_fresh]


def test_tokens_that_no_engine_made_have_no_age():
    tools, real = [made_by(-1, 6)], [made_by(5)]
    assert stale_first.buffer_filter(options("stale_first"), [tools, real], 1) == [real]


def test_the_group_with_the_highest_mean_reward_is_taken_first():
    low, high = make_group([0.0, 1.0]), make_group([1.0, 1.0])
    assert highest_reward.buffer_filter(options("highest_reward"), [low, high], 1) == [high]


def test_samples_without_a_reward_are_left_out_and_groups_without_any_come_last():
    waiting, partial, low = [made_by(), made_by(1)], [make_sample(reward=0.9), made_by(1)], make_group([0.0, 1.0])
    taken = highest_reward.buffer_filter(options("highest_reward"), [waiting, low, partial], 3)
    assert taken == [partial, low, waiting]


def test_the_best_sample_may_decide():
    args = options("highest_reward", "--highest-reward-by", "max")
    even, peak = make_group([0.6, 0.6]), make_group([0.0, 1.0])
    assert highest_reward.buffer_filter(args, [even, peak], 2) == [peak, even]


def test_one_named_reward_may_decide():
    args = options("highest_reward", "--highest-reward-reward", "math")
    wordy, right = [make_sample(reward=9.0, rewards={"math": 0.0})], [make_sample(reward=1.0, rewards={"math": 1.0})]
    assert highest_reward.buffer_filter(args, [wordy, right], 2) == [right, wordy]


GROUPS = st.lists(
    st.lists(
        st.tuples(st.lists(st.integers(-1, 4), max_size=4), st.none() | st.sampled_from([0.0, 0.5, 1.0])), max_size=3
    ),
    max_size=6,
)


@pytest.mark.parametrize("module", [stale_first, highest_reward])
@given(groups=GROUPS, num_groups=st.integers(0, 8))
def test_a_buffer_filter_takes_as_many_as_there_are_and_changes_nothing(module, groups, num_groups):
    args = options(module.__name__.rpartition(".")[2])
    made = [[made_by(*versions) for versions, _ in group] for group in groups]
    for group, specification in zip(made, groups, strict=True):
        for sample, (_, reward) in zip(group, specification, strict=True):
            sample.reward = reward
    before = [[sample.to_dict() for sample in group] for group in made]
    taken = module.buffer_filter(args, list(made), num_groups)
    assert len(taken) == min(num_groups, len(made)) == len({id(group) for group in taken})
    assert {id(group) for group in taken} <= {id(group) for group in made}
    assert [[sample.to_dict() for sample in group] for group in made] == before
