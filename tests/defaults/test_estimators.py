"""The other estimators, called as the trainer calls them, against loops over samples and tokens."""

from __future__ import annotations

import math
import statistics
from argparse import Namespace

import pytest
import torch

from slime_core.defaults import dr_grpo, grpo, opd, reinforce_plus_plus, reinforce_plus_plus_baseline, rloo
from slime_core.errors import OptionError, SlimeError
from slime_core.training.batch import TensorBatch
from slime_core.types import Sample, TrainBatch

# (group, reward, loss mask of the response)
ROUND = [(5, 1.0, [1, 0, 1]), (9, 0.0, [1]), (5, 0.0, [1, 1]), (5, None, [1]), (5, 0.25, [0, 1]), (9, 3.0, [1, 1, 0])]
ARGS = Namespace(grpo_std_normalization=True, reinforce_plus_plus_gamma=0.5, opd_kl_coef=2.0, opd_reward_coef=0.5)
OUTCOME = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def make_round() -> list[Sample]:
    made = []
    for index, (group, reward, mask) in enumerate(ROUND):
        sample = Sample(index=index, group_index=group, reward=reward)
        for trained in mask:
            sample.append([1], logprobs=[-1.0] if trained else None, trainable=bool(trained))
        made.append(sample)
    return made


def batch_of(samples: list[Sample]) -> TensorBatch:
    return TensorBatch.of(TrainBatch.from_samples(samples), torch.device("cpu"))


def estimate(plugin, batch: TensorBatch) -> tuple[list[float], list[float]]:
    whole = TrainBatch.from_samples(make_round())
    given = {
        "args": ARGS,
        "batch": batch,
        "round_rewards": torch.from_numpy(whole.rewards),
        "round_group_index": torch.from_numpy(whole.group_index),
    }
    function = plugin.estimate_advantages
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    advantages, returns = function(**{name: given[name] for name in names})
    assert advantages.dtype == returns.dtype == torch.float32
    assert len(advantages) == len(returns) == batch.num_response_tokens
    return advantages.tolist(), returns.tolist()


def naive_outcome(name: str, index: int) -> float:
    group, reward, _ = ROUND[index]
    if reward is None:
        return 0.0
    peers = [r for g, r, _ in ROUND if g == group and r is not None]
    if name == "rloo":
        return reward - (sum(peers) - reward) / (len(peers) - 1)
    return (reward - statistics.fmean(peers)) / (statistics.stdev(peers) + 1e-6 if name == "grpo" else 1.0)


@pytest.mark.parametrize("name", OUTCOME)
def test_outcome_estimators_give_each_token_its_samples_advantage_less_its_penalty(name):
    samples = make_round()
    mine = [4, 0, 3, 5]  # a rank's part, in another order
    batch = batch_of([samples[i] for i in mine])
    batch.kl_penalty = torch.arange(batch.num_response_tokens) / 8
    advantages, returns = estimate(OUTCOME[name], batch)
    tokens = [naive_outcome(name, i) for i in mine for _ in ROUND[i][2]]
    assert advantages == pytest.approx([a - k / 8 for k, a in enumerate(tokens)], rel=1e-5, abs=1e-6)
    assert returns == advantages


def naive_whiten(values: list[float], trained: list[bool]) -> list[float]:
    kept = [v for v, t in zip(values, trained, strict=True) if t]
    mean, std = statistics.fmean(kept), statistics.pstdev(kept)
    return [(v - mean) / std if t else 0.0 for v, t in zip(values, trained, strict=True)]


def test_reinforce_plus_plus_is_the_whitened_return_of_each_token():
    batch = batch_of(make_round())
    batch.kl_penalty = batch.loss_mask * torch.arange(batch.num_response_tokens) / 8
    returns, trained, place = [], [], 0
    for _, reward, mask in ROUND:
        known = [t for t in range(len(mask)) if mask[t] and reward is not None]
        for t in range(len(mask)):
            later = [u for u in known if u >= t]
            total = sum(0.5**k * (-(place + u) / 8 + (reward if u == known[-1] else 0)) for k, u in enumerate(later))
            returns.append(total if t in known else 0.0)
            trained.append(t in known)
        place += len(mask)
    advantages, got = estimate(reinforce_plus_plus, batch)
    assert got == pytest.approx(returns, abs=1e-6)
    assert advantages == pytest.approx(naive_whiten(returns, trained), abs=1e-5)


def test_the_baseline_form_whitens_the_rewards_relative_to_their_group():
    batch = batch_of(make_round())
    batch.kl_penalty = torch.arange(batch.num_response_tokens) / 8
    tokens = [naive_outcome("dr_grpo", i) for i, row in enumerate(ROUND) for _ in row[2]]
    values = [a - k / 8 for k, a in enumerate(tokens)]
    trained = [bool(m) and reward is not None for _, reward, mask in ROUND for m in mask]
    advantages, returns = estimate(reinforce_plus_plus_baseline, batch)
    assert returns == pytest.approx(values, abs=1e-6)
    assert advantages == pytest.approx(naive_whiten(values, trained), abs=1e-5)


@pytest.mark.parametrize("plugin", [reinforce_plus_plus, reinforce_plus_plus_baseline])
def test_whitening_is_over_all_ranks(plugin):
    samples = make_round()
    whole, _ = estimate(plugin, batch_of(samples))
    # the sums that the other rank would bring: what the whole has more than this rank's part
    seen: list[torch.Tensor] = []
    recorded = batch_of(samples)
    recorded.sum_over_ranks = lambda part: seen.append(part.clone()) or part
    estimate(plugin, recorded)
    sums = iter(seen)
    part = batch_of(samples[:2])
    part.sum_over_ranks = lambda _: next(sums)
    advantages, _ = estimate(plugin, part)
    assert advantages == pytest.approx(whole[: len(advantages)], abs=1e-6)


def test_a_discount_that_makes_no_sense_is_refused():
    with pytest.raises(OptionError, match="--reinforce-plus-plus-gamma 2"):
        reinforce_plus_plus.configure(args=Namespace(reinforce_plus_plus_gamma=2.0))


def test_distillation_rewards_what_the_teacher_finds_likelier():
    batch = batch_of(make_round())
    count = batch.num_response_tokens
    batch.old_logprobs = -torch.arange(count) / 4.0
    batch.teacher_logprobs = torch.full((count,), -1.0)
    batch.teacher_logprobs[1] = math.nan
    tokens = [naive_outcome("grpo", i) for i, row in enumerate(ROUND) for _ in row[2]]
    expected = [0.5 * a - 2.0 * (0 if k == 1 else -k / 4 + 1) for k, a in enumerate(tokens)]
    advantages, _ = estimate(opd, batch)
    assert advantages == pytest.approx(expected, abs=1e-5)


def test_distillation_without_a_teacher_says_how_to_name_one():
    with pytest.raises(SlimeError, match="--teacher-model"):
        estimate(opd, batch_of(make_round()))
