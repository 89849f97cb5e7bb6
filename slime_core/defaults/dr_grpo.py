"""`--advantage-estimator dr_grpo`: a sample's reward less the mean of its group, not divided by anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime_core import hookimpl

if TYPE_CHECKING:
    import torch


@hookimpl
def estimate_advantages(
    batch: Any, round_rewards: torch.Tensor, round_group_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """reward - mean of the sample's group, less the token's KL penalty; returns are the same.

    Liu et al., "Understanding R1-Zero-Like Training" (arXiv 2503.20783), section 3.2. Its other half is a loss that no
    length biases: `--loss-aggregation constant`.
    """
    from slime_core.algorithms import group_normalize

    per_sample = group_normalize(
        batch.rewards,
        batch.group_index,
        divide_by_std=False,
        round_rewards=round_rewards,
        round_group_index=round_group_index,
    )
    advantages = batch.expand(per_sample.float()) - batch.kl_penalty
    return advantages, advantages
