"""`--advantage-estimator reinforce_plus_plus_baseline`: reward less the group's mean, whitened over the round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime_core import hookimpl

if TYPE_CHECKING:
    import torch


@hookimpl
def estimate_advantages(
    batch: Any, round_rewards: torch.Tensor, round_group_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """reward - mean of the sample's group, less the token's KL penalty, whitened over the trained tokens of the round.

    Hu et al., "REINFORCE++" (arXiv 2501.03262), the variant with a group baseline. Returns are what it was before
    whitening. A sample without a reward has no advantage.
    """
    from slime_core.algorithms import group_normalize, whiten

    per_sample = group_normalize(
        batch.rewards,
        batch.group_index,
        divide_by_std=False,
        round_rewards=round_rewards,
        round_group_index=round_group_index,
    )
    returns = batch.expand(per_sample.float()) - batch.kl_penalty
    mask = batch.loss_mask & batch.expand(~batch.rewards.isnan())
    return whiten(returns, mask, sum_over_ranks=batch.sum_over_ranks), returns
