"""Advantages from rewards: normalisation by group, and whitening."""

from __future__ import annotations

import torch


def group_normalize(
    rewards: torch.Tensor,
    group_index: torch.Tensor,
    *,
    divide_by_std: bool = True,
    eps: float = 1e-6,
    round_rewards: torch.Tensor | None = None,
    round_group_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rewards relative to their group: (r - mean) / (std + eps), GRPO's advantage of a sample.

    Shao et al., "DeepSeekMath" (arXiv 2402.03300), section 4.1.2, with the unbiased standard deviation; without the
    division it is the advantage of Dr. GRPO (arXiv 2503.20783). Groups are told by their index, so they may be of any
    size and in any order. In a group whose rewards are all equal, and in a group of one, it is exactly 0.

    Args:
        rewards: [S], NaN where a sample has none; such samples count in no mean and get 0.
        group_index: [S] integers.
        divide_by_std: whether to divide by the group's standard deviation.
        eps: added to the standard deviation.
        round_rewards: [N] the rewards that the means are taken over, where `rewards` is only a part of them.
        round_group_index: [N] their groups.

    Returns:
        float64 [S].

    Raises:
        ValueError: when a group of `rewards` is missing in the round.
    """
    if (round_rewards is None) != (round_group_index is None):
        raise ValueError("give both round_rewards and round_group_index, or neither")
    if round_rewards is None or round_group_index is None:
        round_rewards, round_group_index = rewards, group_index
    groups, row = torch.unique(round_group_index, return_inverse=True)
    if not torch.isin(group_index, groups).all():
        raise ValueError("a group of the batch is missing in the round")
    lowest, mean, std = _statistics(round_rewards.double(), row, len(groups))
    mine = torch.searchsorted(groups, group_index.to(groups.dtype))
    # measured from the group's lowest reward, equal rewards give exactly 0, whatever a sum of them rounds to
    centred = (rewards.double() - lowest[mine]) - mean[mine]
    scaled = centred / (std[mine] + eps) if divide_by_std else centred
    return torch.where(rewards.isnan(), torch.zeros_like(scaled), scaled)


def _statistics(rewards: torch.Tensor, row: torch.Tensor, num_groups: int) -> tuple[torch.Tensor, ...]:
    """For each group: the lowest reward, the mean above it, and the unbiased standard deviation; NaN left out."""
    known = ~rewards.isnan()
    rewards, row = rewards[known], row[known]
    empty = rewards.new_zeros(num_groups)
    count = empty.index_add(0, row, torch.ones_like(rewards))
    lowest = empty.scatter_reduce(0, row, rewards, "amin", include_self=False)
    above = rewards - lowest[row]
    mean = empty.index_add(0, row, above) / count.clamp(min=1)
    squares = empty.index_add(0, row, (above - mean[row]).square())
    return lowest, mean, (squares / (count - 1).clamp(min=1)).sqrt()


def whiten(values: torch.Tensor, mask: torch.Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> torch.Tensor:
    """Scale values to mean 0 and variance 1 over the masked ones: (x - mean) / sqrt(var + eps), biased variance.

    Args:
        values: any shape.
        mask: same shape, bool or 0/1; what it leaves out counts in no statistic.
        shift_mean: False keeps the mean and only scales.
        eps: added to the variance.

    Returns:
        Same shape; 0 where the mask is 0.
    """
    mask = mask.bool()
    count = mask.sum().clamp(min=1)
    kept = torch.where(mask, values, torch.zeros_like(values))
    mean = kept.sum() / count
    centred = torch.where(mask, values - mean, torch.zeros_like(values))
    scaled = centred * torch.rsqrt(centred.square().sum() / count + eps)
    return scaled if shift_mean else torch.where(mask, scaled + mean, torch.zeros_like(values))
