"""`--advantage-estimator opd`: on-policy distillation, each token rewarded by how likely a teacher finds it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from slime_core import SlimeError, hookimpl

if TYPE_CHECKING:
    import torch


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The estimator's flags."""
    parser.add_argument(
        "--opd-kl-coef", type=float, default=1.0, metavar="X", help="weight of log p_student - log p_teacher"
    )
    parser.add_argument(
        "--opd-reward-coef", type=float, default=0.0, metavar="X", help="weight of grpo's advantage of the rewards"
    )


@hookimpl
def estimate_advantages(
    args: argparse.Namespace, batch: Any, round_rewards: torch.Tensor, round_group_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """-coef * (log p_student - log p_teacher) of each token, plus grpo's advantage where it has a weight.

    The one-sample reverse KL of Lu et al., "On-Policy Distillation" (Thinking Machines, 2025), after Agarwal et al.
    (arXiv 2306.13649). The teacher is `--teacher-model`, or the converter's extra key `teacher_logprobs`; where that is
    NaN a token has nothing to learn from it.
    """
    from slime_core.algorithms import group_normalize

    if batch.teacher_logprobs is None:
        raise SlimeError(
            "the estimator opd needs a teacher; name one with --teacher-model, or give its log-probabilities as the "
            "extra key 'teacher_logprobs' of --convert-train-data, one a response token."
        )
    per_sample = group_normalize(
        batch.rewards, batch.group_index, round_rewards=round_rewards, round_group_index=round_group_index
    )
    divergence = (batch.old_logprobs - batch.teacher_logprobs).nan_to_num(0.0)
    outcome = args.opd_reward_coef * batch.expand(per_sample.float())
    advantages = (outcome - args.opd_kl_coef * divergence - batch.kl_penalty).float()
    return advantages, advantages
