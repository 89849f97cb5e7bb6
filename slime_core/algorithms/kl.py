"""Estimators of the KL divergence of a policy from another, one number a token."""

from __future__ import annotations

import torch

from slime_core.algorithms.ratios import importance_ratio

KL_KINDS = ("k1", "k2", "k3", "low_var")
"""The estimators that `kl_estimate` knows."""


def kl_estimate(
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    kind: str = "k3",
    *,
    sampled_logprobs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Estimate KL(policy || reference) at each token that the policy sampled.

    With x = logprobs - reference_logprobs (J. Schulman, "Approximating KL Divergence", 2020):

    - k1: x. Unbiased, may be negative, high variance; as a loss its gradient is 0 on average.
    - k2: x^2 / 2. Biased, low variance; as a loss its gradient is unbiased.
    - k3: exp(-x) - 1 + x. Unbiased, never negative, low variance; as a loss its gradient is that of KL(reference ||
      policy) on average.
    - low_var: k3 clamped to [-10, 10], so that one token cannot dominate.

    With `sampled_logprobs` the estimate is multiplied by exp(logprobs - sampled_logprobs), which makes value and
    gradient of k1 and k3 those of the divergence, also for tokens of an older policy (DeepSeek-V3.2, arXiv 2512.02556,
    section 3.1, "Unbiased KL Estimate").

    Args:
        logprobs: nats, any shape, of the policy.
        reference_logprobs: nats, same shape, of the reference.
        kind: one of `KL_KINDS`.
        sampled_logprobs: nats, same shape, of the policy that sampled the tokens; a constant.

    Returns:
        nats, same shape, with gradient to both arguments.

    Raises:
        ValueError: on an unknown kind.
    """
    if sampled_logprobs is not None:
        return importance_ratio(logprobs, sampled_logprobs.detach()) * kl_estimate(logprobs, reference_logprobs, kind)
    x = logprobs - reference_logprobs
    if kind == "k1":
        return x
    if kind == "k2":
        return x.square() / 2
    if kind == "k3":
        return torch.expm1(-x) + x
    if kind == "low_var":
        # bounded first where it ends at 10 anyway: the gradient of an infinite exponential is no number
        x = x.clamp(-20.0, 20.0)
        return (torch.expm1(-x) + x).clamp(-10.0, 10.0)
    raise ValueError(f"unknown KL estimator '{kind}'; use one of {', '.join(KL_KINDS)}")
