"""Importance ratio and the clipped surrogate against token loops."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.algorithms import cispo_loss, dual_clip, importance_ratio, ppo_clip_loss, sequence_ratio

NUMBERS = st.floats(-3, 3, allow_nan=False, width=32)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=20), st.floats(0, 1), st.floats(0, 2))
def test_ppo_clip_is_the_smaller_surrogate(rows, low, high):
    new, old, advantages = (torch.tensor(column) for column in zip(*rows, strict=True))
    loss, clipped = ppo_clip_loss(importance_ratio(new, old), advantages, low, high)
    for i, (lp, lo, a) in enumerate(rows):
        ratio = math.exp(lp - lo)
        bounded = min(max(ratio, 1 - low), 1 + high)
        surrogate = min(a * ratio, a * bounded)
        assert math.isclose(loss[i].item(), -surrogate, rel_tol=1e-4, abs_tol=1e-4)
        if abs(a * ratio - a * bounded) > 1e-3:
            assert clipped[i].item() == (a * bounded < a * ratio)


def test_a_clipped_token_has_no_gradient():
    new = torch.tensor([1.0, 1.0, -1.0, -1.0], requires_grad=True)
    loss, clipped = ppo_clip_loss(importance_ratio(new, torch.zeros(4)), torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.2, 0.2)
    loss.sum().backward()
    assert clipped.tolist() == [True, False, False, True]
    assert (new.grad == 0).tolist() == [True, False, False, True]


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=20), st.floats(1.5, 4))
def test_dual_clip_bounds_the_loss_of_bad_tokens(rows, bound):
    ratio, advantages = torch.tensor([r for r, _ in rows]).exp(), torch.tensor([a for _, a in rows])
    loss, _ = ppo_clip_loss(ratio, advantages, 0.2, 0.2)
    got, bounded = dual_clip(loss, advantages, bound)
    for i, (r, a) in enumerate(rows):
        surrogate = min(a * math.exp(r), a * min(max(math.exp(r), 0.8), 1.2))
        expected = max(surrogate, bound * a) if a < 0 else surrogate
        assert math.isclose(got[i].item(), -expected, rel_tol=1e-4, abs_tol=1e-4)
        assert bounded[i].item() == (got[i] != loss[i]).item()


def test_gradients_of_the_clipped_surrogate_are_those_of_finite_differences():
    new = torch.tensor([0.05, 0.4, -0.4, 1.9, -0.1, 0.3], dtype=torch.float64, requires_grad=True)
    old = torch.zeros(6, dtype=torch.float64)
    advantages = torch.tensor([1.0, 2.0, 1.0, -1.0, -0.5, -2.0], dtype=torch.float64)

    def loss(x):
        return dual_clip(ppo_clip_loss(importance_ratio(x, old), advantages, 0.2, 0.28)[0], advantages, 3.0)[0]

    assert torch.autograd.gradcheck(loss, (new,))
    (got,) = torch.autograd.grad(loss(new).sum(), new)
    # not clipped; clipped above; below, which costs A > 0 nothing; beyond the dual bound; A < 0 twice in reach
    expected = [-math.exp(0.05), 0.0, -math.exp(-0.4), 0.0, 0.5 * math.exp(-0.1), 2 * math.exp(0.3)]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


@given(st.lists(st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), max_size=5), min_size=1, max_size=5))
def test_a_sequences_ratio_is_the_geometric_mean_of_its_tokens(samples):
    rows = [token for sample in samples for token in sample]
    new, old = (torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in (0, 1))
    mask = torch.tensor([row[2] for row in rows], dtype=torch.bool)
    got = sequence_ratio(new, old, mask, torch.tensor([len(s) for s in samples]))
    expected = []
    for sample in samples:
        trained = [n - o for n, o, m in sample if m]
        expected += [math.exp(sum(trained) / max(1, len(trained)))] * len(sample)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


def test_with_one_advantage_a_sequence_the_gradient_is_that_of_gspos_own_ratio():
    new = torch.tensor([0.1, -0.2, 0.4, 0.0, 0.3], dtype=torch.float64, requires_grad=True)
    old, mask = torch.zeros(5, dtype=torch.float64), torch.tensor([True, True, False, True, True])
    lengths, advantages = torch.tensor([3, 2]), [1.5, -0.5]
    tokens = sequence_ratio(new, old, mask, lengths) * torch.tensor([1.5, 1.5, 1.5, -0.5, -0.5])
    by_token = tokens[:2].mean() + tokens[3:].mean()

    # s_i written out, eq. 7: its gradient comes through the mean
    def direct(x):
        return torch.exp(x[:2].mean()) * advantages[0] + torch.exp(x[3:].mean()) * advantages[1]

    assert torch.autograd.gradcheck(direct, (new,))
    assert math.isclose(by_token.item(), direct(new).item())
    left, right = (torch.autograd.grad(value, new)[0] for value in (by_token, direct(new)))
    torch.testing.assert_close(left, right)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=20), st.floats(0, 1), st.floats(0, 2))
def test_cispo_weighs_every_tokens_gradient(rows, low, high):
    new, old, advantages = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    new.requires_grad_()
    loss, clipped = cispo_loss(new, old, advantages, low, high)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    for i, (n, o, a) in enumerate(rows):
        weight = min(max(math.exp(n - o), 1 - low), 1 + high)
        assert math.isclose(loss[i].item(), -weight * a * n, abs_tol=1e-9)
        assert math.isclose(gradient[i].item(), -weight * a, abs_tol=1e-9)
        if abs(weight - math.exp(n - o)) > 1e-9:
            assert clipped[i]
