"""From rewards a token to returns and advantages; a state is a trained token, what lies between (tools) is skipped.

Shapes: S samples, R response tokens in all, the tokens of sample after sample lying one after the other.
"""

from __future__ import annotations

import torch

from slime_core.algorithms.aggregation import segment_sum


def at_last_token(per_sample: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Put one number a sample on the last of its trained tokens.

    Args:
        per_sample: [S].
        mask: [R], bool or 0/1, the trained tokens.
        lengths: [S] integers, response tokens of each sample.

    Returns:
        [R], 0 elsewhere; a sample without a trained token leaves no trace.
    """
    mask = mask.bool()
    last = _after(mask, lengths) == 0
    return torch.where(mask & last, torch.repeat_interleave(per_sample, lengths, output_size=len(mask)), 0.0)


def discounted_returns(
    rewards: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor, gamma: float = 1.0
) -> torch.Tensor:
    """Return-to-go of each trained token: G_t = r_t + gamma * G_{t+1}, t counting the trained tokens of a sample.

    Sutton and Barto, "Reinforcement Learning" (2nd edition), equation 3.9.

    Args:
        rewards: [R], each token's own.
        mask: [R], bool or 0/1, the trained tokens.
        lengths: [S] integers, response tokens of each sample.
        gamma: discount, from 0 to 1.

    Returns:
        [R], 0 where the mask is 0.
    """
    mask = mask.bool()
    summed = _scan(rewards[mask], _after(mask, lengths)[mask], gamma)
    return torch.zeros_like(rewards).masked_scatter(mask, summed)


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    lengths: torch.Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation: A_t = sum of (gamma * lam)^k * delta_{t+k}.

    delta_t = r_t + gamma * V_{t+1} - V_t, and V is 0 after the last trained token. Schulman et al., "High-Dimensional
    Continuous Control Using Generalized Advantage Estimation" (arXiv 1506.02438), equation 16.

    Args:
        rewards: [R], each token's own.
        values: [R], a critic's value before each token.
        mask: [R], bool or 0/1, the trained tokens.
        lengths: [S] integers, response tokens of each sample.
        gamma: discount, from 0 to 1.
        lam: from 0 (one step) to 1 (returns less values).

    Returns:
        Advantages and returns (advantages + values), [R] each, 0 where the mask is 0.
    """
    mask = mask.bool()
    after = _after(mask, lengths)[mask]
    value = values[mask]
    following = torch.cat([value[1:], value.new_zeros(1)])[: len(value)]
    delta = rewards[mask] + gamma * torch.where(after > 0, following, 0.0) - value
    advantages = _scan(delta, after, gamma * lam)
    empty = torch.zeros_like(values)
    return empty.masked_scatter(mask, advantages), empty.masked_scatter(mask, advantages + value)


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped squared error of a critic: max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2).

    The form of OpenAI Baselines' PPO, described in Huang et al., "The 37 Implementation Details of Proximal Policy
    Optimization" (2022), detail 9.

    Args:
        values: any shape.
        old_values: same shape, before the round's first update.
        returns: same shape.
        clip: how far a value may move.

    Returns:
        The loss, same shape, and a bool tensor of the same shape: where the clipped branch holds.
    """
    moved = values - old_values
    plain = (values - returns).square()
    clipped = (old_values + moved.clamp(-clip, clip) - returns).square()
    # of a value that moved less, the two differ by rounding
    return torch.maximum(plain, clipped), (moved.detach().abs() > clip) & (clipped.detach() > plain.detach())


def _after(mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[R] how many trained tokens of the same sample follow each token."""
    counted = mask.long()
    trained = segment_sum(counted, lengths)
    up_to_sample = torch.repeat_interleave(trained.cumsum(0), lengths, output_size=len(mask))
    return up_to_sample - counted.cumsum(0)


def _scan(values: torch.Tensor, after: torch.Tensor, decay: float) -> torch.Tensor:
    """y_t = x_t + decay * y_{t+1} within each sample, in log2(longest) steps that each double the reach."""
    summed, reach = values.double(), 1
    while bool((after >= reach).any()):
        further = torch.cat([summed[reach:], summed.new_zeros(reach)])
        summed = summed + torch.where(after >= reach, decay**reach * further, 0.0)
        reach *= 2
    return summed.to(values.dtype)
