"""Group normalisation and whitening against plain Python."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.algorithms import group_normalize, leave_one_out, whiten

REWARDS = st.one_of(st.floats(-5, 5, allow_nan=False), st.just(math.nan))
ROUNDS = st.lists(st.tuples(st.integers(0, 4), REWARDS), min_size=1, max_size=25)


def naive(rows, divide_by_std):
    out = []
    for group, reward in rows:
        if math.isnan(reward):
            out.append(0.0)
            continue
        peers = [r for g, r in rows if g == group and not math.isnan(r)]
        std = statistics.stdev(peers) if len(peers) > 1 else 0.0
        out.append((reward - statistics.fmean(peers)) / (std + 1e-6 if divide_by_std else 1.0))
    return out


@given(ROUNDS, st.booleans())
def test_group_normalize_is_the_naive_one(rows, divide_by_std):
    groups, rewards = zip(*rows, strict=True)
    got = group_normalize(torch.tensor(rewards).double(), torch.tensor(groups), divide_by_std=divide_by_std)
    torch.testing.assert_close(got, torch.tensor(naive(rows, divide_by_std)).double(), rtol=1e-6, atol=1e-6)


@given(st.floats(-1e6, 1e6, allow_nan=False), st.integers(1, 9))
def test_equal_rewards_give_exactly_zero(reward, size):
    rewards = torch.tensor([reward] * size + [0.0, 1.0], dtype=torch.float64)
    groups = torch.tensor([7] * size + [8, 8])
    assert group_normalize(rewards, groups)[:size].tolist() == [0.0] * size


def test_uneven_groups_are_told_by_index_not_by_place():
    # an all-correct group of 4 next to (0, 0, 1): the four must have no advantage
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    groups = torch.tensor([3, 9, 3, 3, 9, 9, 3])
    got = group_normalize(rewards, groups, divide_by_std=False)
    torch.testing.assert_close(got, torch.tensor([0, -1 / 3, 0, 0, -1 / 3, 2 / 3, 0], dtype=torch.float64))


@given(ROUNDS, st.data())
def test_a_part_of_the_round_gets_what_the_whole_gives_it(rows, data):
    groups, rewards = (torch.tensor(column) for column in zip(*rows, strict=True))
    rewards = rewards.double()
    part = torch.tensor(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10)), dtype=torch.int64)
    whole = group_normalize(rewards, groups)
    mine = group_normalize(rewards[part], groups[part], round_rewards=rewards, round_group_index=groups)
    assert mine.tolist() == whole[part].tolist()


def test_a_group_that_the_round_lacks_is_refused():
    one = torch.ones(1)
    with pytest.raises(ValueError, match="missing in the round"):
        group_normalize(one, torch.tensor([5]), round_rewards=one, round_group_index=torch.tensor([4]))


def test_whiten_gives_mean_0_and_variance_1_over_the_mask():
    values = torch.tensor([1.0, 2.0, 100.0, 4.0, 5.0])
    mask = torch.tensor([1, 1, 0, 1, 1])
    got = whiten(values, mask)
    kept = [1.0, 2.0, 4.0, 5.0]
    std = statistics.pstdev(kept)
    expected = [(v - 3.0) / std for v in kept]
    torch.testing.assert_close(got[mask.bool()], torch.tensor(expected))
    assert got[2] == 0
    torch.testing.assert_close(whiten(values, mask, shift_mean=False)[mask.bool()], torch.tensor(expected) + 3.0)


def test_whiten_of_nothing_is_nothing():
    assert whiten(torch.tensor([3.0, math.nan]), torch.zeros(2)).tolist() == [0.0, 0.0]


@given(ROUNDS)
def test_leave_one_out_compares_with_the_others(rows):
    groups, rewards = zip(*rows, strict=True)
    expected = []
    for i, (group, reward) in enumerate(rows):
        others = [r for j, (g, r) in enumerate(rows) if g == group and j != i and not math.isnan(r)]
        expected.append(0.0 if math.isnan(reward) or not others else reward - statistics.fmean(others))
    got = leave_one_out(torch.tensor(rewards).double(), torch.tensor(groups))
    torch.testing.assert_close(got, torch.tensor(expected).double(), rtol=1e-6, atol=1e-6)


@given(st.lists(st.tuples(st.floats(-9, 9), st.booleans()), min_size=1, max_size=20), st.integers(0, 20))
def test_whitening_by_parts_with_a_sum_over_ranks_is_whitening_the_whole(rows, cut):
    values = torch.tensor([v for v, _ in rows], dtype=torch.float64)
    mask = torch.tensor([m for _, m in rows])
    sums = []

    def alone(part):
        sums.append(part.clone())
        return part

    whole = whiten(values, mask, sum_over_ranks=alone)
    for rows_of_rank in (slice(None, cut), slice(cut, None)):
        answers = iter(sums)
        mine = whiten(values[rows_of_rank], mask[rows_of_rank], sum_over_ranks=lambda part, a=answers: next(a))
        torch.testing.assert_close(mine, whole[rows_of_rank])
