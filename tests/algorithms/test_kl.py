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


@pytest.mark.parametrize(
    ("kind", "unbiased", "of"),
    [("k1", True, "policy"), ("k2", False, "policy"), ("k3", True, "policy"), ("k3", False, "reference")],
)
def test_the_mean_gradient_is_that_of_a_divergence(kind, unbiased, of):
    # expectations over a whole vocabulary: the gradient of the estimate, averaged over what the policy samples, is the
    # gradient of KL(policy || reference), or for k3 as it stands that of KL(reference || policy)
    torch.manual_seed(1)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    q = torch.randn(6, dtype=torch.float64).log_softmax(0)
    sampled = torch.randn(6, dtype=torch.float64).log_softmax(0) if unbiased else None
    p = logits.log_softmax(0)
    weights = (p if sampled is None else sampled).exp().detach()
    (got,) = torch.autograd.grad((weights * kl_estimate(p, q, kind, sampled_logprobs=sampled)).sum(), logits)
    p = logits.log_softmax(0)
    exact = (p.exp() * (p - q)).sum() if of == "policy" else (q.exp() * (q - p)).sum()
    torch.testing.assert_close(got, torch.autograd.grad(exact, logits)[0])


def test_k1_as_a_loss_has_no_gradient_on_average():
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    p = logits.log_softmax(0)
    (got,) = torch.autograd.grad((p.exp().detach() * kl_estimate(p, torch.zeros(6), "k1")).sum(), logits)
    torch.testing.assert_close(got, torch.zeros_like(got))


@pytest.mark.parametrize("kind", KL_KINDS)
def test_gradients_are_those_of_finite_differences(kind):
    p = torch.tensor([-0.1, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([-0.4, -1.0, -3.5], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, q, kind), (p,))
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, q, kind, sampled_logprobs=q + 0.1), (p,))


def test_low_var_has_a_finite_gradient_however_far_apart():
    p = torch.tensor([-500.0], requires_grad=True)
    kl_estimate(p, torch.tensor([-0.1]), "low_var").sum().backward()
    assert p.grad.tolist() == [0.0]
