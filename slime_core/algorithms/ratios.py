"""Importance ratios and the policy losses made of them."""

from __future__ import annotations

import torch

from slime_core.algorithms.aggregation import masked_sequence_mean


def importance_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """Return exp(logprobs - old_logprobs), any shape: how much likelier the policy makes a token than the old one."""
    return torch.exp(logprobs - old_logprobs)


def ppo_clip_loss(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped surrogate, as a loss: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)).

    Schulman et al., "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), equation 7; a `clip_high` above
    `clip_low` is the asymmetric range of DAPO (arXiv 2503.14476), equation 10.

    Args:
        ratio: importance ratio, any shape.
        advantages: same shape.
        clip_low: how far the ratio may fall below 1.
        clip_high: how far it may rise above 1.

    Returns:
        The loss, same shape, and a bool tensor of the same shape: where the clipped branch holds, without gradient.
    """
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(unclipped, clipped), clipped.detach() > unclipped.detach()


def dual_clip(loss: torch.Tensor, advantages: torch.Tensor, bound: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Bound a clipped surrogate where the advantage is negative: min(loss, -bound * A) for A < 0.

    Ye et al., "Mastering Complex Control in MOBA Games" (arXiv 1912.09729), dual-clip PPO: without it a token that
    became far likelier than it was makes an unbounded loss.

    Args:
        loss: of `ppo_clip_loss`, any shape.
        advantages: same shape.
        bound: largest ratio that counts, above 1.

    Returns:
        The loss, and a bool tensor of the same shape: where the bound holds, without gradient.
    """
    limit = -bound * advantages
    bounded = (advantages < 0) & (loss.detach() > limit)
    return torch.where(bounded, limit, loss), bounded


def sequence_ratio(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """GSPO's ratio of a sequence, exp(mean of log-ratios), at each of its tokens, with the token's own gradient.

    Zheng et al., "Group Sequence Policy Optimization" (arXiv 2507.18071), equations 7 and 14: sg[s_i] * p / sg[p],
    whose value is s_i and which takes advantages that differ within a sequence. With equal ones the gradient of a
    sequence's mean is that of s_i.

    Args:
        logprobs: [R].
        old_logprobs: [R].
        mask: [R], bool or 0/1; other tokens count in no mean.
        lengths: [S] integers, response tokens of each sample.

    Returns:
        [R].
    """
    means = masked_sequence_mean((logprobs - old_logprobs).detach(), mask, lengths)
    expanded = torch.repeat_interleave(means, lengths, output_size=len(logprobs))
    return torch.exp(expanded + logprobs - logprobs.detach())


def cispo_loss(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE with a clipped importance weight: -sg[clip(r, 1 - clip_low, 1 + clip_high)] * A * log p.

    MiniMax, "MiniMax-M1" (arXiv 2506.13585), equations 4 and 5: the weight is clipped, no token loses its gradient.

    Args:
        logprobs: any shape.
        old_logprobs: same shape.
        advantages: same shape.
        clip_low: how far the ratio may fall below 1; 1 is no bound, as in the paper.
        clip_high: how far it may rise above 1.

    Returns:
        The loss, same shape, and a bool tensor of the same shape: where the weight was clipped.
    """
    ratio = importance_ratio(logprobs, old_logprobs).detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages * logprobs, weight != ratio
