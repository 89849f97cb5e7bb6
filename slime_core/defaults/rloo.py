"""`--advantage-estimator rloo`: a sample's reward less the mean of the others in its group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime_core import hookimpl

if TYPE_CHECKING:
    import torch


@hookimpl
def estimate_advantages(
    batch: Any, round_rewards: torch.Tensor, round_group_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """reward - mean of the other samples of its group, less the token's KL penalty; returns are the same.

    Ahmadian et al., "Back to Basics" (arXiv 2402.14740), the RLOO estimator; see `algorithms.leave_one_out`.
    """
    from slime_core.algorithms import leave_one_out

    per_sample = leave_one_out(
        batch.rewards, batch.group_index, round_rewards=round_rewards, round_group_index=round_group_index
    )
    advantages = batch.expand(per_sample.float()) - batch.kl_penalty
    return advantages, advantages
