"""`--advantage-estimator grpo`: a sample's reward relative to its group, the same for each of its tokens."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from slime_core import hookimpl

if TYPE_CHECKING:
    import torch


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The estimator's flags."""
    parser.add_argument(
        "--grpo-std-normalization",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="divide by the group's standard deviation",
    )


@hookimpl
def estimate_advantages(
    args: argparse.Namespace, batch: Any, round_rewards: torch.Tensor, round_group_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(reward - mean) / std of the sample's group, less the token's KL penalty; returns are the same.

    Shao et al., "DeepSeekMath" (arXiv 2402.03300), section 4.1.2; see `algorithms.group_normalize`.
    """
    from slime_core.algorithms import group_normalize

    per_sample = group_normalize(
        batch.rewards,
        batch.group_index,
        divide_by_std=args.grpo_std_normalization,
        round_rewards=round_rewards,
        round_group_index=round_group_index,
    )
    advantages = batch.expand(per_sample.float()) - batch.kl_penalty
    return advantages, advantages
