import math
import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.testing import make_group, make_sample
from slime_core.tracking.metrics import (
    attempts,
    eval_metrics,
    has_equal_rewards,
    pass_at_k,
    perf_metrics,
    rollout_metrics,
)
from slime_core.types import Sample, Status


def test_reward_statistics_leave_out_samples_without_a_reward():
    metrics = rollout_metrics([make_group([0.0, 1.0]), make_group([None, 0.5])])
    assert metrics["reward/mean"] == pytest.approx(0.5)
    assert metrics["reward/std"] == pytest.approx(math.sqrt(1 / 6))
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.0, 1.0)


def test_each_reward_plugin_has_its_mean_over_the_samples_it_scored():
    group = [
        make_sample(reward=1.0, rewards={"math": 1.0, "style": 0.5}),
        make_sample(reward=0.0, rewards={"math": 0.0}),
    ]
    metrics = rollout_metrics([group])
    assert metrics["reward/math/mean"] == 0.5
    assert metrics["reward/style/mean"] == 0.5


def test_lengths_and_truncation():
    group = [make_sample("abc", prompt="pq", reward=0.0), make_sample("a", prompt="pqrs", status=Status.TRUNCATED)]
    metrics = rollout_metrics([[*group, make_sample("abcdefgh", prompt="pqr")]])
    lengths = {name: metrics[f"rollout/response_length_{name}"] for name in ("mean", "median", "min", "max")}
    assert lengths == {"mean": 4.0, "median": 3.0, "min": 1.0, "max": 8.0}
    assert metrics["rollout/prompt_length_mean"] == 3.0
    assert metrics["rollout/truncated_fraction"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("tokens", "repeats"),
    [
        ([3, 1, 4, 1, 5] * 120, True),
        (list(range(1000)) + [7] * 600, True),
        (np.random.default_rng(0).zipf(1.3, 600).clip(max=50_000).tolist(), False),
        ([7] * 300, False),
    ],
)
def test_a_response_that_ends_in_a_loop_is_counted(tokens, repeats):
    sample = Sample(tokens=np.arange(9, dtype=np.int32), reward=0.0)
    sample.append(tokens)
    assert rollout_metrics([[sample]])["rollout/repetition_fraction"] == repeats


def test_counts_come_under_their_reason_and_plugin():
    metrics = rollout_metrics([make_group([1.0])], dropped={"zero_std_0": 3}, failed={"math": 2})
    assert metrics["rollout/dropped/zero_std_0"] == 3
    assert metrics["reward/failed/math"] == 2
    assert (metrics["rollout/num_groups"], metrics["rollout/num_samples"]) == (1, 1)


def test_groups_with_equal_rewards_are_counted():
    groups = [make_group([1.0, 1.0]), make_group([0.0, 1.0]), make_group([0.1 + 0.2, 0.3]), make_group([None, 1.0])]
    assert rollout_metrics(groups)["rollout/zero_std_fraction"] == 0.75


def test_a_group_without_rewards_teaches_nothing():
    assert has_equal_rewards(make_group([None, None]))


def test_a_round_without_rewards_has_no_reward_metrics():
    metrics = rollout_metrics([make_group([None, None])])
    assert not [name for name in metrics if name.startswith("reward/")]
    assert metrics["rollout/num_samples"] == 2


def test_an_empty_round_has_counts_only():
    assert rollout_metrics([]) == {"rollout/num_groups": 0, "rollout/num_samples": 0}


def test_staleness_counts_trained_tokens_that_an_engine_made():
    sample = make_sample(reward=1.0)
    sample.append([1, 2], logprobs=[0.0, 0.0], weight_version=3)
    sample.append([3, 4], trainable=False)
    sample.append([5], logprobs=[0.0], weight_version=5)
    sample.append([6], logprobs=[0.0], weight_version=0, trainable=False)
    metrics = rollout_metrics([[sample]], weight_version=6)
    assert metrics["rollout/staleness_mean"] == pytest.approx((3 + 3 + 1) / 3)
    assert metrics["rollout/staleness_max"] == 3


def test_staleness_counts_from_the_newest_version_when_none_is_given():
    sample = make_sample(reward=1.0)
    sample.append([1, 2], logprobs=[0.0, 0.0], weight_version=np.array([3, 5]))
    assert rollout_metrics([[sample]])["rollout/staleness_max"] == 2


def brute_pass_at_k(correct: list[bool], k: int) -> float:
    draws = list(combinations(correct, k))
    return sum(any(draw) for draw in draws) / len(draws)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_mean_over_every_choice_of_k(correct: list[bool], data):
    k = data.draw(st.integers(1, len(correct)))
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(brute_pass_at_k(correct, k), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_refuses_what_it_cannot_estimate(n, c, k):
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(n, c, k)


def test_evaluation_counts_failed_samples_as_wrong():
    metrics = eval_metrics("heldout", [make_group([1.0, None]), make_group([1.0, 1.0])])
    assert metrics["eval/heldout/mean"] == 0.75
    assert metrics["eval/heldout/failed_fraction"] == 0.25


def test_evaluation_gives_pass_at_powers_of_two_up_to_n():
    metrics = eval_metrics("heldout", [make_group([1.0, 0.0, 0.0, 0.0, 0.0]), make_group([0.0] * 5)])
    rates = {name.rpartition("@")[2]: value for name, value in metrics.items() if "@" in name}
    assert rates == {"1": pytest.approx(0.1), "2": pytest.approx(0.2), "4": pytest.approx(0.4)}


def test_a_prompt_with_too_few_attempts_for_k_is_left_out_of_pass_at_k():
    metrics = eval_metrics("heldout", [make_group([1.0, 1.0]), make_group([0.0])], n=2)
    assert (metrics["eval/heldout/pass@1"], metrics["eval/heldout/pass@2"]) == (0.5, 1.0)


@pytest.mark.parametrize(("reward", "rate"), [(1.0, 1.0), (1.5, 1.0), (0.99, 0.0), (-1.0, 0.0)])
def test_an_attempt_is_correct_from_a_reward_of_one(reward, rate):
    assert eval_metrics("heldout", [make_group([reward])])["eval/heldout/pass@1"] == rate


def test_a_fan_out_is_one_attempt():
    group = [make_sample(reward=1.0, rollout_index=0), make_sample(reward=0.0, rollout_index=0)]
    assert attempts([*group, make_sample(reward=1.0, rollout_index=1)]) == [0.5, 1.0]


def test_an_empty_data_set_has_no_metrics():
    assert eval_metrics("heldout", []) == {}


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, None]), min_size=1, max_size=5), min_size=1, max_size=5))
def test_every_metric_is_a_finite_number(rewards: list[list[float | None]]):
    groups = [make_group(r, group_index=i) for i, r in enumerate(rewards)]
    metrics = rollout_metrics(groups, dropped={"x": 1}) | eval_metrics("heldout", groups)
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())


def test_phase_times_and_speeds():
    metrics = perf_metrics({"rollout": 2.0, "train": 4.0, "step": 8.0}, train_tokens=80, num_trainers=2)
    assert metrics == {
        "perf/rollout_s": 2.0,
        "perf/train_s": 4.0,
        "perf/step_s": 8.0,
        "perf/train_tokens_per_s": 20.0,
        "perf/train_tokens_per_s_per_device": 10.0,
        "perf/wait_fraction": 0.25,
    }


def test_a_speed_needs_its_phase():
    assert perf_metrics({"step": 1.0}, train_tokens=5) == {"perf/step_s": 1.0}


def documented_names() -> list[str]:
    """The names in docs/metrics.md as patterns, where `<anything>` stands for a name."""
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    names = re.findall(r"^\| (`.+?`) \|", page, flags=re.MULTILINE)
    return [re.sub("<.+?>", ".+", re.escape(name)) for row in names for name in re.findall("`(.+?)`", row)]


def test_every_name_is_documented():
    group = [make_sample("a", prompt="b", reward=1.0, rewards={"math": 1.0}), make_sample(reward=0.0)]
    metrics = rollout_metrics([group], dropped={"zero_std_1": 1}, failed={"math": 1}) | eval_metrics("heldout", [group])
    metrics |= perf_metrics({"rollout": 1.0, "train": 1.0, "step": 2.0}, train_tokens=1)
    patterns = documented_names()
    assert [name for name in metrics if not any(re.fullmatch(pattern, name) for pattern in patterns)] == []


def test_turns_and_tool_calls_are_counted_over_the_samples_that_take_turns():
    searched = make_sample("ab", turn_ends=[1, 2], metadata={"tool_calls": 3, "failed_tool_calls": 1})
    answered = make_sample("a", turn_ends=[1], metadata={"tool_calls": 0, "failed_tool_calls": 0})
    metrics = rollout_metrics([[searched, answered], [make_sample("plain")]])
    names = ("turns_mean", "tool_calls_mean", "tool_use_fraction", "failed_tool_calls")
    assert [metrics[f"rollout/{name}"] for name in names] == [1.5, 1.5, 0.5, 1.0]
    assert "rollout/turns_mean" not in rollout_metrics([[make_sample("plain")]])
