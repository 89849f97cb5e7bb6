"""Importance weights and the mask of off-policy sequences against token loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.algorithms import (
    CORRECTION_KINDS,
    CORRECTION_LEVELS,
    importance_weights,
    offpolicy_mask,
    vetoed_sequences,
    weight_sums,
)

NUMBERS = st.floats(-2, 2, width=32)
ENGINE = st.one_of(NUMBERS, st.just(math.nan))
SAMPLES = st.lists(st.lists(st.tuples(NUMBERS, ENGINE, st.booleans()), max_size=5), min_size=1, max_size=5)


def columns(samples):
    rows = [token for sample in samples for token in sample]
    old, engine = (torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in (0, 1))
    mask = torch.tensor([row[2] for row in rows], dtype=torch.bool)
    return old, engine, mask, torch.tensor([len(s) for s in samples])


def naive_weights(samples, kind, level, low, high):
    out = []
    for sample in samples:
        offs = [0.0 if math.isnan(e) else o - e for o, e, _ in sample]
        trained = [off for off, (*_, m) in zip(offs, sample, strict=True) if m]
        for off in offs:
            if level == "sequence":
                off = sum(trained)
            elif level == "geometric":
                off = sum(trained) / max(1, len(trained))
            ratio = math.exp(off)
            inside = low <= ratio <= high
            weight = {"tis": min(max(ratio, low), high), "icepop": ratio * inside, "mask": float(inside)}[kind]
            out.append((weight, not inside))
    return out


@given(SAMPLES, st.sampled_from(CORRECTION_KINDS), st.sampled_from(CORRECTION_LEVELS))
def test_weights_are_the_naive_ones(samples, kind, level):
    # bounds that no ratio of 32-bit numbers meets by rounding
    low, high = 0.543210987, 2.123456789
    weights, outside = importance_weights(*columns(samples), kind=kind, level=level, low=low, high=high)
    expected = naive_weights(samples, kind, level, low, high)
    assert weights.tolist() == pytest.approx([w for w, _ in expected], abs=1e-9)
    assert outside.tolist() == [o for _, o in expected]


def test_weights_carry_no_gradient_and_a_hopeless_ratio_is_finite():
    old = torch.tensor([0.0, -1.0], requires_grad=True)
    weights, _ = importance_weights(
        old, torch.tensor([-900.0, -1.0]), torch.ones(2), torch.tensor([2]), kind="icepop", low=0.0, high=1e30
    )
    assert not weights.requires_grad
    assert weights.isfinite().all()


def test_an_unknown_kind_or_level_is_refused():
    one = torch.zeros(1)
    for wrong in ({"kind": "pop"}, {"kind": "tis", "level": "batch"}):
        with pytest.raises(ValueError, match="unknown importance correction"):
            importance_weights(one, one, one, torch.tensor([1]), low=0.0, high=2.0, **wrong)


@given(SAMPLES, st.data())
def test_offpolicy_sequences_are_the_naive_ones(samples, data):
    now, sampled, mask, lengths = columns(samples)
    advantages = torch.tensor(data.draw(st.lists(NUMBERS, min_size=len(now), max_size=len(now))), dtype=torch.float64)
    got = offpolicy_mask(now, sampled, advantages, mask, lengths, 0.1234567)
    expected, place = [], 0
    for sample in samples:
        offs = [0.0 if math.isnan(e) else e - o for o, e, m in sample if m]
        far = sum(offs) / max(1, len(offs)) > 0.1234567
        expected += [far and a < 0 for a in advantages[place : place + len(sample)].tolist()]
        place += len(sample)
    assert got.tolist() == expected


@given(SAMPLES)
def test_one_token_below_the_bound_vetoes_its_sequence(samples):
    low = 0.3210987654
    expected = []
    for sample in samples:
        broken = any(m and not math.isnan(e) and math.exp(o - e) < low for o, e, m in sample)
        expected += [broken] * len(sample)
    assert vetoed_sequences(*columns(samples), low).tolist() == expected


@given(SAMPLES, st.sampled_from(CORRECTION_LEVELS))
def test_weights_divided_by_their_mean_have_mean_1(samples, level):
    *tokens, mask, lengths = columns(samples)
    weights, _ = importance_weights(*tokens, mask, lengths, kind="tis", level=level, low=0.1, high=3.0)
    sums = weight_sums(weights, mask, lengths, level)
    assert sums.shape == lengths.shape
    parts = zip(weights.split(lengths.tolist()), mask.split(lengths.tolist()), strict=True)
    of_samples = [w[m].tolist() for w, m in parts]
    averaged = [w for ws in of_samples for w in (ws if level == "token" else ws[:1])]
    assert sums.sum().item() == pytest.approx(sum(averaged), abs=1e-9)
