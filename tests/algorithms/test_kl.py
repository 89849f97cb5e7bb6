"""KL estimators against their formulas, token by token."""

from __future__ import annotations

import math

import pytest
import torch

from slime_core.algorithms import KL_KINDS, kl_estimate

POLICY = [-0.1, -2.0, -3.0, -0.5]
REFERENCE = [-0.4, -1.0, -3.0, -30.0]


@pytest.mark.parametrize(
    ("kind", "formula"),
    [
        ("k1", lambda x: x),
        ("k2", lambda x: x * x / 2),
        ("k3", lambda x: math.exp(-x) - 1 + x),
        ("low_var", lambda x: min(10.0, max(-10.0, math.exp(-x) - 1 + x))),
    ],
)
def test_each_estimator_is_its_formula(kind, formula):
    got = kl_estimate(torch.tensor(POLICY), torch.tensor(REFERENCE), kind)
    expected = [formula(a - b) for a, b in zip(POLICY, REFERENCE, strict=True)]
    torch.testing.assert_close(got, torch.tensor(expected))


def test_k1_and_k3_average_to_the_divergence():
    torch.manual_seed(0)
    p, q = torch.randn(6).log_softmax(0), torch.randn(6).log_softmax(0)
    exact = (p.exp() * (p - q)).sum()
    for kind in ("k1", "k3"):
        expected_value = (p.exp() * kl_estimate(p, q, kind)).sum()
        torch.testing.assert_close(expected_value, exact)


def test_unknown_kind_lists_the_known():
    with pytest.raises(ValueError, match=", ".join(KL_KINDS)):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k9")
