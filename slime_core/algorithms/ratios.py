"""Importance ratios and the clipped surrogate loss."""

from __future__ import annotations

import torch


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
