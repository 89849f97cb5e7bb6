import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core import Drop, OptionError, Status
from slime_core.testing import make_group, make_options, make_sample
from slime_filters import any_correct, length_range, not_truncated, pass_rate_range


@functools.cache
def options(name, *flags):
    return make_options("--dynamic-filter", name, *flags)


def of_lengths(*lengths):
    return [make_sample("x" * length, reward=1.0) for length in lengths]


def of_statuses(*statuses):
    return [make_sample("x", status=status, reward=1.0) for status in statuses]


def test_one_truncated_response_drops_a_group():
    group = of_statuses(Status.COMPLETED, Status.TRUNCATED)
    assert not_truncated.dynamic_filter(options("not_truncated"), group) == Drop("truncated")


def test_truncated_responses_up_to_the_allowed_fraction_are_kept():
    args = options("not_truncated", "--not-truncated-max-fraction", "0.5")
    assert not_truncated.dynamic_filter(args, of_statuses(Status.COMPLETED, Status.TRUNCATED)) is None
    assert not_truncated.dynamic_filter(args, of_statuses(Status.TRUNCATED, Status.TRUNCATED)) == Drop("truncated")


@pytest.mark.parametrize(
    ("lengths", "verdict"),
    [([2, 4], None), ([1, 1], Drop("too_short")), ([9, 9], Drop("too_long")), ([1, 5], None), ([], None)],
)
def test_the_mean_length_of_a_group_must_lie_in_the_range(lengths, verdict):
    args = options("length_range", "--length-range-min", "3", "--length-range-max", "4")
    assert length_range.dynamic_filter(args, of_lengths(*lengths)) == verdict


@pytest.mark.parametrize(
    ("lengths", "verdict"), [([3, 4], None), ([1, 4], Drop("too_short")), ([3, 5], Drop("too_long"))]
)
def test_each_length_of_a_group_may_be_held_to_the_range(lengths, verdict):
    args = options("length_range", "--length-range-min", "3", "--length-range-max", "4", "--length-range-of", "each")
    assert length_range.dynamic_filter(args, of_lengths(*lengths)) == verdict


@pytest.mark.parametrize("flags", [[], ["--length-range-min", "5", "--length-range-max", "4"]])
def test_a_length_range_of_nothing_or_everything_is_refused(flags):
    with pytest.raises(OptionError, match="--length-range-min"):
        length_range.configure(options("length_range", *flags))


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [
        ([0.0, 1.0], None),
        ([0.0, 0.7 + 0.3 - 1e-9], None),
        ([0.0, 0.9], Drop("none_correct")),
        ([None, 1.0], None),
        ([None], Drop("no_reward")),
        ([], Drop("no_reward")),
    ],
)
def test_one_correct_sample_keeps_a_group(rewards, verdict):
    assert any_correct.dynamic_filter(options("any_correct"), make_group(rewards)) == verdict


def test_the_threshold_says_what_is_correct():
    args = options("any_correct", "--any-correct-threshold", "0.5")
    assert any_correct.dynamic_filter(args, make_group([0.0, 0.5])) is None


def test_one_named_reward_may_decide():
    args = options("any_correct", "--any-correct-reward", "math")
    group = [make_sample(reward=1.3, rewards={"math": 0.0, "style": 1.3}), make_sample(reward=0.0, rewards={})]
    assert any_correct.dynamic_filter(args, group) == Drop("none_correct")


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [
        ([0.0] * 4, Drop("too_hard")),
        ([1.0] * 4, Drop("too_easy")),
        ([1.0, 0.0, 0.0, 0.0], None),
        ([None, None], Drop("no_reward")),
    ],
)
def test_the_default_pass_rates_drop_all_wrong_and_all_right(rewards, verdict):
    assert pass_rate_range.dynamic_filter(options("pass_rate_range"), make_group(rewards)) == verdict


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=10))
def test_the_bounds_of_the_pass_rate_belong_to_the_range(rewards: list[float]):
    rate = sum(rewards) / len(rewards)
    args = options("pass_rate_range", "--pass-rate-range-min", "0.2", "--pass-rate-range-max", "0.8")
    verdict = pass_rate_range.dynamic_filter(args, make_group(rewards))
    expected = "too_hard" if rate < 0.2 - 1e-9 else "too_easy" if rate > 0.8 + 1e-9 else None
    assert (verdict.reason if verdict else None) == expected


def test_a_range_of_pass_rates_that_holds_nothing_is_refused():
    with pytest.raises(OptionError, match=r"--pass-rate-range-min 0\.9 is above"):
        pass_rate_range.configure(
            options("pass_rate_range", "--pass-rate-range-min", "0.9", "--pass-rate-range-max", "0.1")
        )


@pytest.mark.parametrize(
    ("module", "name", "flags", "group"),
    [
        (not_truncated, "not_truncated", [], of_statuses(Status.TRUNCATED)),
        (length_range, "length_range", ["--length-range-min", "2"], of_lengths(1)),
        (any_correct, "any_correct", [], make_group([0.0])),
        (pass_rate_range, "pass_rate_range", [], make_group([0.0, 0.0])),
    ],
)
def test_the_spare_flag_keeps_dropped_groups_in_reserve(module, name, flags, group):
    spare = f"--{name.replace('_', '-')}-spare"
    assert module.dynamic_filter(options(name, *flags, spare), group).spare
    assert not module.dynamic_filter(options(name, *flags), group).spare
