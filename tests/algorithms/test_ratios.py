"""Importance ratio and the clipped surrogate against token loops."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.algorithms import importance_ratio, ppo_clip_loss

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
