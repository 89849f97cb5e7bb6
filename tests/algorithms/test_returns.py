"""Returns, advantages by GAE and the value loss against loops over the trained tokens of each sample."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.algorithms import at_last_token, discounted_returns, gae, value_loss

NUMBERS = st.floats(-3, 3, width=32)
TOKENS = st.tuples(NUMBERS, NUMBERS, st.booleans())
SAMPLES = st.lists(st.lists(TOKENS, max_size=11), min_size=1, max_size=6)
FRACTIONS = st.sampled_from([0.0, 0.5, 0.9, 1.0])


def flatten(samples):
    rows = [token for sample in samples for token in sample]
    rewards, values = (torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in (0, 1))
    mask = torch.tensor([row[2] for row in rows], dtype=torch.bool)
    return rewards, values, mask, torch.tensor([len(s) for s in samples])


def naive_gae(samples, gamma, lam):
    advantages, returns = [], []
    for sample in samples:
        trained = [(r, v) for r, v, m in sample if m]
        mine, running = [], 0.0
        for t in reversed(range(len(trained))):
            reward, value = trained[t]
            following = trained[t + 1][1] if t + 1 < len(trained) else 0.0
            running = reward + gamma * following - value + gamma * lam * running
            mine.insert(0, (running, running + value))
        for *_, m in sample:
            a, g = mine.pop(0) if m else (0.0, 0.0)
            advantages.append(a)
            returns.append(g)
    return advantages, returns


@given(SAMPLES, FRACTIONS, FRACTIONS)
def test_gae_is_the_naive_recursion(samples, gamma, lam):
    advantages, returns = gae(*flatten(samples), gamma, lam)
    expected = naive_gae(samples, gamma, lam)
    assert advantages.tolist() == pytest.approx(expected[0], abs=1e-6)
    assert returns.tolist() == pytest.approx(expected[1], abs=1e-6)


@given(SAMPLES, FRACTIONS)
def test_returns_are_gae_without_values(samples, gamma):
    rewards, _, mask, lengths = flatten(samples)
    expected, _ = naive_gae([[(r, 0.0, m) for r, _, m in s] for s in samples], gamma, 1.0)
    assert discounted_returns(rewards, mask, lengths, gamma).tolist() == pytest.approx(expected, abs=1e-6)


def test_a_return_written_out():
    rewards = torch.tensor([1.0, 100.0, 2.0, 4.0, 8.0])
    mask = torch.tensor([1, 0, 1, 1, 1])
    got = discounted_returns(rewards, mask, torch.tensor([4, 1]), 0.5)
    assert got.tolist() == [1 + 0.5 * (2 + 0.5 * 4), 0.0, 2 + 0.5 * 4, 4.0, 8.0]


@pytest.mark.parametrize("length", [1, 2, 1000, 4097])
def test_long_samples_and_their_neighbours_do_not_mix(length):
    rewards, lengths = torch.ones(2 * length), torch.tensor([length, length])
    got = discounted_returns(rewards, torch.ones(2 * length), lengths)
    assert got.tolist() == [*range(length, 0, -1)] * 2


def test_the_reward_lies_on_the_last_trained_token():
    mask = torch.tensor([1, 1, 0, 0, 0, 1])
    got = at_last_token(torch.tensor([5.0, 7.0, 9.0]), mask, torch.tensor([3, 2, 1]))
    assert got.tolist() == [0, 5, 0, 0, 0, 9]


def test_a_masked_nan_does_not_spread():
    rewards = torch.tensor([1.0, math.nan, 1.0])
    assert discounted_returns(rewards, torch.tensor([1, 0, 1]), torch.tensor([3])).tolist() == [2.0, 0.0, 1.0]


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=9), st.floats(0, 1))
def test_value_loss_is_the_larger_square(rows, clip):
    new, old, returns = (torch.tensor(column) for column in zip(*rows, strict=True))
    loss, clipped = value_loss(new, old, returns, clip)
    for i, (v, o, g) in enumerate(rows):
        bounded = (min(max(v, o - clip), o + clip) - g) ** 2
        assert math.isclose(loss[i].item(), max((v - g) ** 2, bounded), rel_tol=1e-4, abs_tol=1e-4)
        if abs(bounded - (v - g) ** 2) > 1e-3:
            assert clipped[i].item() == (bounded > (v - g) ** 2)


def test_a_value_that_moved_no_further_than_the_clip_is_not_clipped():
    # old + (new - old) is new up to rounding, by which its square may be the larger
    generator = torch.Generator().manual_seed(0)
    new, old, returns = (0.2 * torch.rand(1000, generator=generator) - 0.1 for _ in range(3))
    assert not value_loss(new, old, returns, 0.3)[1].any()


def test_the_value_losss_gradient_is_that_of_finite_differences():
    values = torch.tensor([0.3, 1.4, -0.8], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.0, 1.5, 0.0], dtype=torch.float64)
    returns = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, 0.2)[0], (values,))
    assert value_loss(values, old, returns, 0.2)[1].tolist() == [True, False, True]
