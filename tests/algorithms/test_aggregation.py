"""Means over tokens and sequences, and that splitting a batch does not change them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.algorithms import AGGREGATIONS, masked_mean, masked_sequence_mean, segment_sum, token_weights

SAMPLES = st.lists(st.lists(st.tuples(st.floats(-9, 9, width=32), st.booleans()), max_size=6), min_size=1, max_size=8)

CONSTANT = 7


def flatten(samples):
    values = torch.tensor([v for s in samples for v, _ in s], dtype=torch.float64)
    mask = torch.tensor([m for s in samples for _, m in s], dtype=torch.bool)
    return values, mask, torch.tensor([len(s) for s in samples])


def naive_loss(samples, kind):
    sums = [(sum(v for v, m in s if m), sum(m for _, m in s)) for s in samples]
    if kind == "token":
        return sum(total for total, _ in sums) / max(1, sum(n for _, n in sums))
    if kind == "rollout":
        pairs = [sums[i : i + 2] for i in range(0, len(sums), 2)]
        totals = [(sum(t for t, _ in pair), sum(n for _, n in pair)) for pair in pairs]
        means = [total / n for total, n in totals if n]
        return sum(means) / max(1, len(means))
    if kind == "constant":
        return sum(total for total, _ in sums) / (len(sums) * CONSTANT)
    means = [total / n for total, n in sums if n]
    return sum(means) / max(1, len(means))


@given(SAMPLES)
def test_sequence_means_are_the_naive_ones(samples):
    values, mask, lengths = flatten(samples)
    sums = [(sum(v for v, m in s if m), sum(m for _, m in s)) for s in samples]
    expected = torch.tensor([total / max(1, n) for total, n in sums], dtype=torch.float64)
    torch.testing.assert_close(masked_sequence_mean(values, mask, lengths), expected)
    torch.testing.assert_close(masked_mean(values, mask).item(), naive_loss(samples, "token"))


@given(SAMPLES, st.sampled_from(AGGREGATIONS), st.data())
def test_weights_give_the_same_loss_however_the_batch_is_split(samples, kind, data):
    counts = {
        "token": sum(m for s in samples for _, m in s),
        "sequence": sum(any(m for _, m in s) for s in samples),
        "rollout": sum(any(m for s in samples[i : i + 2] for _, m in s) for i in range(0, len(samples), 2)),
        "constant": len(samples) * CONSTANT,
    }
    # two samples a rollout
    siblings = [samples[i // 2 * 2 : i // 2 * 2 + 2] for i in range(len(samples))]
    sizes = torch.tensor([sum(m for s in pair for _, m in s) for pair in siblings])
    total = counts[kind]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(samples)), max_size=3)))
    loss = 0.0
    for start, end in zip([0, *cuts], [*cuts, len(samples)], strict=True):
        if samples[start:end]:
            values, mask, lengths = flatten(samples[start:end])
            loss += (
                (token_weights(mask, lengths, kind, max(1, total), rollout_tokens=sizes[start:end]).double() * values)
                .sum()
                .item()
            )
    assert math.isclose(loss, naive_loss(samples, kind), abs_tol=1e-5)


def test_masked_out_nan_does_not_count():
    values = torch.tensor([1.0, math.nan, 3.0])
    mask = torch.tensor([1, 0, 1])
    assert masked_mean(values, mask) == 2
    assert masked_sequence_mean(values, mask, torch.tensor([2, 1])).tolist() == [1.0, 3.0]


def test_segment_sum_of_an_empty_sample_is_zero():
    assert segment_sum(torch.tensor([1.0, 2.0]), torch.tensor([0, 2, 0])).tolist() == [0.0, 3.0, 0.0]


def test_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="token, sequence, rollout, constant"):
        token_weights(torch.ones(1), torch.tensor([1]), "rows", 1)
