"""The grpo estimator, called as the trainer calls it."""

from __future__ import annotations

import math
import statistics
from argparse import Namespace

import pytest
import torch

from slime_core.defaults import grpo
from slime_core.training.batch import TensorBatch
from slime_core.types import Sample, TrainBatch


def make_round(rows: list[tuple[int, float | None, int]]) -> list[Sample]:
    """Samples from (group, reward, response length)."""
    made = []
    for index, (group, reward, length) in enumerate(rows):
        sample = Sample(index=index, group_index=group, reward=reward)
        sample.append([1] * length)
        made.append(sample)
    return made


def estimate(mine: list[Sample], whole: list[Sample], *, std: bool = True) -> tuple[list[float], list[float]]:
    batch = TensorBatch.of(TrainBatch.from_samples(mine), torch.device("cpu"))
    everyone = TrainBatch.from_samples(whole)
    advantages, returns = grpo.estimate_advantages(
        args=Namespace(grpo_std_normalization=std),
        batch=batch,
        round_rewards=torch.from_numpy(everyone.rewards),
        round_group_index=torch.from_numpy(everyone.group_index),
    )
    assert advantages.dtype == torch.float32
    return advantages.tolist(), returns.tolist()


@pytest.mark.parametrize("std", [True, False])
def test_every_token_has_its_samples_advantage_over_the_whole_round(std):
    whole = make_round([(5, 1.0, 2), (9, 0.0, 1), (5, 0.0, 3), (9, 3.0, 0), (5, 0.25, 1)])
    mine = [whole[4], whole[0], whole[3], whole[1]]
    peers = [1.0, 0.0, 0.25]
    scale = statistics.stdev(peers) + 1e-6 if std else 1.0
    nines = statistics.stdev([0.0, 3.0]) + 1e-6 if std else 1.0
    mean = statistics.fmean(peers)
    expected = [(0.25 - mean) / scale, (1 - mean) / scale, (1 - mean) / scale, -1.5 / nines]
    advantages, returns = estimate(mine, whole, std=std)
    assert advantages == pytest.approx(expected, rel=1e-6)
    assert returns == advantages


def test_an_all_correct_group_has_no_advantage_beside_another():
    whole = make_round([(0, 1.0, 1)] * 4 + [(1, 0.0, 1), (1, 0.0, 1), (1, 1.0, 1)])
    advantages, _ = estimate(whole, whole)
    assert advantages[:4] == [0.0] * 4
    assert all(abs(a) > 0.5 for a in advantages[4:])


def test_a_sample_without_reward_has_no_advantage_and_counts_in_no_mean():
    whole = make_round([(0, 1.0, 1), (0, None, 2), (0, 0.0, 1)])
    advantages, _ = estimate(whole, whole, std=False)
    assert advantages == [0.5, 0.0, 0.0, -0.5]
    assert not any(math.isnan(a) for a in advantages)


def test_a_rank_without_samples_gets_nothing():
    assert estimate([], make_round([(0, 1.0, 1)])) == ([], [])
