"""Each alarm sounds for what it is about, once while it lasts, and for nothing else."""

from __future__ import annotations

import math
import re
from argparse import Namespace

import pytest

from slime_core.tracking.alarms import Alarms

FINE = {
    "reward/min": 0.0,
    "reward/max": 1.0,
    "rollout/num_samples": 8.0,
    "rollout/num_groups": 2.0,
    "rollout/zero_std_fraction": 0.5,
    "train/nonfinite_steps": 0.0,
    "train/logprob_abs_diff": 0.01,
    "train/mismatch_kl": 0.001,
    "train/entropy": 2.0,
    "train/ppo_kl": 0.0,
    "train/first_step_ref_kl": 0.0,
    "train/first_step_drift": 0.001,
}
ARGS = {"num_steps_per_rollout": 1, "use_rollout_logprobs": False, "ref_model": None, "critic_only_rounds": 0}


def sounded(rounds: list[dict[str, float]], **options) -> list[str]:
    said: list[str] = []
    alarms = Alarms(Namespace(**{**ARGS, **options}), said.append)
    for step, metrics in enumerate(rounds):
        alarms.check(step, {**FINE, **metrics})
    return said


def test_a_round_like_any_other_is_silent():
    assert sounded([{}] * 9) == []
    assert Alarms(Namespace(**ARGS), pytest.fail).check(0, {}) is None


@pytest.mark.parametrize(
    ("metrics", "advice"),
    [
        ({"reward/max": 0.0}, "--label-key"),
        ({"rollout/zero_std_fraction": 1.0}, "nonzero_std"),
        ({"train/nonfinite_steps": 2.0}, "2 optimiser steps was not finite.*skipped_steps/"),
        ({"train/logprob_abs_diff": 0.3}, "--engine-dtype"),
        ({"train/mismatch_kl": 0.02}, "grew from 0.001 to 0.02.*--importance-correction"),
        ({"train/entropy": 0.05}, "from 2 to 0.05.*--entropy-coef"),
    ],
)
def test_an_alarm_sounds_once_while_it_lasts_and_again_when_it_comes_back(metrics, advice):
    said = sounded([{}] * 6 + [metrics] * 3 + [{}] + [metrics])
    assert [message.split(":")[0] for message in said] == ["warning, round 6", "warning, round 10"]
    assert all(re.search(advice, message) for message in said)


@pytest.mark.parametrize(("name", "bad", "nearly"), [("train/entropy", 0.09, 0.11), ("train/mismatch_kl", 0.02, 0.015)])
def test_a_value_that_wavers_about_its_bound_sounds_once(name, bad, nearly):
    assert len(sounded([{name: 2.0 if "entropy" in name else 0.0035}] * 6 + [{name: bad}, {name: nearly}] * 4)) == 1


@pytest.mark.parametrize(("name", "bad"), [("train/entropy", 0.05), ("train/mismatch_kl", 0.02)])
def test_a_resumed_run_is_compared_with_the_first_rounds_of_its_log(name, bad):
    said: list[str] = []
    alarms = Alarms(Namespace(**ARGS), said.append)
    first = [{"step": 0, "eval/x/mean": 0.5}, {"step": 0, **FINE, name: None}]
    logged = [*first, *({"step": i, **FINE} for i in range(9))]
    alarms.recall([*logged, *({"step": 9 + i, **FINE, name: bad} for i in range(9))])
    alarms.check(18, {**FINE, name: bad})
    assert len(said) == 1


NAN = {"train/entropy": math.nan, "train/mismatch_kl": math.nan, "train/logprob_abs_diff": math.nan}


@pytest.mark.parametrize("bad_round", [0, 6])
def test_a_round_of_nan_neither_sounds_as_a_collapse_nor_hides_one(bad_round):
    rounds: list[dict[str, float]] = [{}] * 8 + [{"train/entropy": 0.05}]
    rounds[bad_round] = NAN
    said = sounded(rounds)
    assert [message.split(":")[0] for message in said] == ["warning, round 8"]
    assert "entropy fell from 2 to 0.05" in said[0]


def test_imitation_without_rewards_may_grow_sure_of_itself():
    said: list[str] = []
    alarms = Alarms(Namespace(**ARGS), said.append)
    for step, entropy in enumerate([5.0] * 6 + [0.1] * 3):
        alarms.check(step, {"train/entropy": entropy})
    assert said == []


def test_one_sample_a_prompt_needs_no_differences_within_groups():
    assert sounded([{"rollout/zero_std_fraction": 1.0, "rollout/num_groups": 8.0}]) == []


def test_a_mismatch_that_was_there_from_the_start_did_not_grow():
    assert sounded([{"train/mismatch_kl": 0.02}] * 9) == []


@pytest.mark.parametrize(
    ("metrics", "options", "sounds"),
    [
        ({"train/ppo_kl": 0.01}, {}, True),
        ({"train/ppo_kl": 0.01}, {"num_steps_per_rollout": 2}, False),
        ({"train/ppo_kl": 0.01}, {"use_rollout_logprobs": True}, False),
        ({"train/first_step_ref_kl": 0.01}, {}, True),
        ({"train/first_step_ref_kl": 0.01}, {"num_steps_per_rollout": 2}, True),
        ({"train/first_step_ref_kl": 0.01}, {"ref_model": "elsewhere"}, False),
    ],
)
def test_invariants_are_those_of_the_first_round(metrics, options, sounds):
    assert bool(sounded([metrics], **options)) == sounds
    assert sounded([{}, metrics], **options) == []


def test_the_first_round_of_a_policy_comes_after_those_of_its_critic():
    late: list[dict[str, float]] = [{}] * 3 + [{"train/ppo_kl": 0.01}]
    assert len(sounded(late, critic_only_rounds=3)) == 1
    assert sounded(late, critic_only_rounds=2) == []


def test_a_policy_that_differs_from_itself_of_a_moment_ago_sounds_in_any_round():
    assert len(sounded([{}] * 7 + [{"train/first_step_drift": 0.1}], num_steps_per_rollout=2)) == 1
