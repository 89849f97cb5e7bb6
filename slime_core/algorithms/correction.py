"""Importance correction: the engine that sampled is not quite the policy that trains, by numerics or by age."""

from __future__ import annotations

import math

import torch

from slime_core.algorithms.aggregation import masked_sequence_mean, segment_sum

CORRECTION_KINDS = ("tis", "icepop", "mask")
"""What `importance_weights` does with a ratio out of bounds."""

CORRECTION_LEVELS = ("token", "sequence", "geometric")
"""What `importance_weights` takes the ratio of."""

MAX_LOG_RATIO = 20.0
"""Beyond it exp is of no use; ratios stop there."""


def importance_weights(
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    mask: torch.Tensor,
    lengths: torch.Tensor,
    *,
    kind: str,
    level: str = "token",
    low: float,
    high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of tokens that the engine sampled, for a loss of the trainer's policy.

    With w = p_trainer / p_engine, each before the update:

    - tis: w clamped to [low, high]; truncated importance sampling (Yao et al., "Your Efficient RL Framework Secretly
      Brings You Off-Policy RL Training", 2025).
    - icepop: w inside [low, high], 0 outside (Ring-1T, arXiv 2510.18855); at level sequence it is the
      masked sequence-level correction of Liu et al., "When Speed Kills Stability" (2025).
    - mask: 1 inside, 0 outside; it rejects and does not weigh.

    The ratio is that of the token, of the whole sequence (the product over its trained tokens), or its geometric mean
    over them, which does not fall or grow with length.

    Args:
        old_logprobs: [R], the trainer's, before the round's first update.
        rollout_logprobs: [R], the engine's; where it is NaN the ratio is 1.
        mask: [R], bool or 0/1; other tokens count in no sequence.
        lengths: [S] integers, response tokens of each sample.
        kind: one of `CORRECTION_KINDS`.
        level: one of `CORRECTION_LEVELS`.
        low: the smallest ratio let through.
        high: the largest.

    Returns:
        [R] weights without gradient, and a bool [R]: where the ratio was out of bounds.

    Raises:
        ValueError: on an unknown kind or level.
    """
    if kind not in CORRECTION_KINDS or level not in CORRECTION_LEVELS:
        known = f"{', '.join(CORRECTION_KINDS)} by {', '.join(CORRECTION_LEVELS)}"
        raise ValueError(f"unknown importance correction '{kind}' by '{level}'; use one of {known}")
    off = torch.where(rollout_logprobs.isnan(), 0.0, (old_logprobs - rollout_logprobs).detach())
    if level != "token":
        of_sample = (
            segment_sum(torch.where(mask.bool(), off, 0.0), lengths)
            if level == "sequence"
            else masked_sequence_mean(off, mask, lengths)
        )
        off = torch.repeat_interleave(of_sample, lengths, output_size=len(off))
    ratio = torch.exp(off.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    outside = (ratio < low) | (ratio > high)
    if kind == "tis":
        return ratio.clamp(low, high), outside
    inside = ratio if kind == "icepop" else torch.ones_like(ratio)
    return torch.where(outside, 0.0, inside), outside


def vetoed_sequences(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor, low: float
) -> torch.Tensor:
    """Which sequences have a trained token with p_trainer / p_engine < low: one such token tells of a broken sample.

    The veto of Liu et al., "When Speed Kills Stability" (2025).

    Args:
        old_logprobs: [R], the trainer's, before the round's first update.
        rollout_logprobs: [R], the engine's; a token where it is NaN vetoes nothing.
        mask: [R], bool or 0/1.
        lengths: [S] integers, response tokens of each sample.
        low: the smallest ratio let through, above 0.

    Returns:
        bool [R], true at every token of such a sequence.
    """
    below = mask.bool() & (old_logprobs - rollout_logprobs < math.log(low))
    vetoes = segment_sum(below.to(torch.int64), lengths)
    return torch.repeat_interleave(vetoes > 0, lengths, output_size=len(below))


def weight_sums(weights: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor, level: str) -> torch.Tensor:
    """What `importance_weights` are averaged over: [S] sums over a sample's trained tokens, or a sequence's one weight.

    Their total, over the trained tokens at level token, else over the samples that train, is the mean weight; dividing
    by it makes importance sampling self-normalised.

    Args:
        weights: [R].
        mask: [R], bool or 0/1.
        lengths: [S] integers, response tokens of each sample.
        level: one of `CORRECTION_LEVELS`.
    """
    if level == "token":
        return segment_sum(torch.where(mask.bool(), weights, 0.0), lengths)
    return masked_sequence_mean(weights, mask, lengths)


def offpolicy_mask(
    logprobs: torch.Tensor,
    sampled_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    lengths: torch.Tensor,
    delta: float,
) -> torch.Tensor:
    """Which tokens are too far off to learn from: A < 0, in a sequence with mean(log p_sampled - log p) > delta.

    DeepSeek-V3.2 (arXiv 2512.02556), section 3.1, "Off-Policy Sequence Masking".

    Args:
        logprobs: [R], the policy's now.
        sampled_logprobs: [R], of the policy that sampled.
        advantages: [R].
        mask: [R], bool or 0/1; other tokens count in no mean.
        lengths: [S] integers, response tokens of each sample.
        delta: in nats.

    Returns:
        bool [R], true where the loss should be 0.
    """
    off = torch.where(sampled_logprobs.isnan(), 0.0, (sampled_logprobs - logprobs).detach())
    means = masked_sequence_mean(off, mask, lengths)
    return (advantages < 0) & torch.repeat_interleave(means > delta, lengths, output_size=len(logprobs))
