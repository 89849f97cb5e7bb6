"""Advantages from rewards: relative to the group, and whitening."""

from __future__ import annotations

from collections.abc import Callable

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
    centred, std, _ = _relative(rewards, group_index, round_rewards, round_group_index)
    scaled = centred / (std + eps) if divide_by_std else centred
    return torch.where(rewards.isnan(), torch.zeros_like(scaled), scaled)


def leave_one_out(
    rewards: torch.Tensor,
    group_index: torch.Tensor,
    *,
    round_rewards: torch.Tensor | None = None,
    round_group_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each reward less the mean of the others in its group: n / (n - 1) * (r - mean), RLOO's advantage of a sample.

    Ahmadian et al., "Back to Basics" (arXiv 2402.14740), the RLOO estimator. Arguments, return value and
    errors are those of `group_normalize`; a group of one has nothing to compare with and gets 0.
    """
    centred, _, count = _relative(rewards, group_index, round_rewards, round_group_index)
    scaled = centred * count / (count - 1).clamp(min=1)
    return torch.where(rewards.isnan(), torch.zeros_like(scaled), scaled)


def _relative(
    rewards: torch.Tensor,
    group_index: torch.Tensor,
    round_rewards: torch.Tensor | None,
    round_group_index: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each sample, float64 [S]: reward less its group's mean, the group's deviation, its number of rewards."""
    if (round_rewards is None) != (round_group_index is None):
        raise ValueError("give both round_rewards and round_group_index, or neither")
    if round_rewards is None or round_group_index is None:
        round_rewards, round_group_index = rewards, group_index
    groups, row = torch.unique(round_group_index, return_inverse=True)
    if not torch.isin(group_index, groups).all():
        raise ValueError("a group of the batch is missing in the round")
    lowest, mean, std, count = _statistics(round_rewards.double(), row, len(groups))
    mine = torch.searchsorted(groups, group_index.to(groups.dtype))
    # measured from the group's lowest reward, equal rewards give exactly 0, whatever a sum of them rounds to
    return (rewards.double() - lowest[mine]) - mean[mine], std[mine], count[mine]


def _statistics(rewards: torch.Tensor, row: torch.Tensor, num_groups: int) -> tuple[torch.Tensor, ...]:
    """For each group: lowest reward, mean above it, unbiased standard deviation, count; NaN left out."""
    known = ~rewards.isnan()
    rewards, row = rewards[known], row[known]
    empty = rewards.new_zeros(num_groups)
    count = empty.index_add(0, row, torch.ones_like(rewards))
    lowest = empty.scatter_reduce(0, row, rewards, "amin", include_self=False)
    above = rewards - lowest[row]
    mean = empty.index_add(0, row, above) / count.clamp(min=1)
    squares = empty.index_add(0, row, (above - mean[row]).square())
    return lowest, mean, (squares / (count - 1).clamp(min=1)).sqrt(), count


def whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Scale values to mean 0 and variance 1 over the masked ones: (x - mean) / sqrt(var + eps), biased variance.

    Args:
        values: any shape.
        mask: same shape, bool or 0/1; what it leaves out counts in no statistic.
        shift_mean: False keeps the mean and only scales.
        eps: added to the variance.
        sum_over_ranks: sums a tensor over all ranks, so that the statistics are those of the whole round; an
            estimator gives `batch.sum_over_ranks`.

    Returns:
        Same shape; 0 where the mask is 0.
    """
    mask = mask.bool()
    total = sum_over_ranks or (lambda part: part)
    kept = torch.where(mask, values, torch.zeros_like(values))
    count, summed = total(torch.stack([mask.sum().double(), kept.sum(dtype=torch.float64)]))
    mean = (summed / count.clamp(min=1)).to(values.dtype)
    centred = torch.where(mask, values - mean, torch.zeros_like(values))
    squares = total(centred.square().sum(dtype=torch.float64)[None])[0]
    scaled = centred * torch.rsqrt(squares / count.clamp(min=1) + eps).to(values.dtype)
    return scaled if shift_mean else torch.where(mask, scaled + mean, torch.zeros_like(values))
