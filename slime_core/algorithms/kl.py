"""Estimators of the KL divergence of a policy from another, one number a token."""

from __future__ import annotations

import torch

KL_KINDS = ("k1", "k2", "k3", "low_var")
"""The estimators that `kl_estimate` knows."""


def kl_estimate(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, kind: str = "k3") -> torch.Tensor:
    """Estimate KL(policy || reference) at each token that the policy sampled.

    With x = logprobs - reference_logprobs (J. Schulman, "Approximating KL Divergence", 2020):

    - k1: x. Unbiased, may be negative, high variance.
    - k2: x^2 / 2. Biased, low variance; its gradient is unbiased.
    - k3: exp(-x) - 1 + x. Unbiased, never negative, low variance.
    - low_var: k3 clamped to [-10, 10], so that one token cannot dominate.

    Args:
        logprobs: nats, any shape, of the policy.
        reference_logprobs: nats, same shape, of the reference.
        kind: one of `KL_KINDS`.

    Returns:
        nats, same shape, with gradient to both arguments.

    Raises:
        ValueError: on an unknown kind.
    """
    x = logprobs - reference_logprobs
    if kind == "k1":
        return x
    if kind == "k2":
        return x.square() / 2
    if kind == "k3":
        return torch.expm1(-x) + x
    if kind == "low_var":
        return (torch.expm1(-x) + x).clamp(-10.0, 10.0)
    raise ValueError(f"unknown KL estimator '{kind}'; use one of {', '.join(KL_KINDS)}")
