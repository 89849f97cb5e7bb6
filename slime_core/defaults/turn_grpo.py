"""`--advantage-estimator turn_grpo`: GRPO of the whole trajectory, and of each turn's own reward."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slime_core import OptionError, hookimpl

if TYPE_CHECKING:
    import torch

EPS = 1e-6


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The estimator's flags."""
    parser.add_argument(
        "--turn-grpo-coef",
        type=float,
        default=1.0,
        metavar="C",
        help="weight of the turns' rewards beside the outcome's",
    )


@hookimpl
def configure(args: argparse.Namespace) -> None:
    """Refuse samples of one turn each: there all are first turns.

    Raises:
        OptionError: under `--convert-train-data turns`.
    """
    if args.convert_train_data == "turns":
        raise OptionError("--advantage-estimator turn_grpo needs whole trajectories; drop --convert-train-data turns.")


@hookimpl
def estimate_advantages(
    args: argparse.Namespace, batch: Any, round_rewards: torch.Tensor, round_group_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of turn k gets A_outcome + coef * (A_k + A_k+1 + ...), less its KL penalty; returns are the same.

    A_outcome is GRPO's; A_j is the reward of turn j, (r - mean) / std over the turns j of the group. For two turns
    with the first one rewarded that is MT-GRPO (Zeng et al., "Reinforcing Multi-Turn Reasoning in LLM Agents via
    Turn-Level Credit Assignment", arXiv 2505.11821). Without rewards by turn it is GRPO.
    """
    from slime_core.algorithms import group_normalize

    outcome = group_normalize(
        batch.rewards, batch.group_index, round_rewards=round_rewards, round_group_index=round_group_index
    )
    advantages = batch.expand(outcome.float()) - batch.kl_penalty
    if "turn_reward" in batch:
        advantages = advantages + args.turn_grpo_coef * _of_turns(batch, round_group_index)
    return advantages, advantages


def _of_turns(batch: Any, round_group_index: torch.Tensor) -> torch.Tensor:
    """float32 [R], for each token the sum of its turn's advantage and of those that follow."""
    import torch

    rewards = batch["turn_reward"].double()
    ends = ~rewards.isnan()
    num_ends = torch.cumsum(ends, 0)
    # within its sample: turns that ended before the token
    first = torch.cumsum(batch.response_lengths, 0) - batch.response_lengths
    before_sample = torch.cat([num_ends.new_zeros(1), num_ends])[first]
    turn = num_ends - ends.long() - batch.expand(before_sample)
    # an upper bound that all ranks agree on
    num_turns = int(
        batch.sum_over_ranks((turn[ends].max() + 1 if ends.any() else turn.new_zeros(())).double()[None])[0]
    )
    groups = torch.unique(round_group_index)
    group = torch.searchsorted(groups, batch.group_index)
    cell = batch.expand(group)[ends] * num_turns + turn[ends]
    advantage = torch.zeros_like(rewards)
    advantage[ends] = _normalized(rewards[ends], cell, len(groups) * num_turns, batch.sum_over_ranks)
    total = torch.cumsum(advantage, 0)
    last = torch.cat([total.new_zeros(1), total])[first + batch.response_lengths]
    to_go: torch.Tensor = batch.expand(last) - total + advantage
    return to_go.float()


def _normalized(
    rewards: torch.Tensor,
    cell: torch.Tensor,
    num_cells: int,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """(r - mean) / (std + eps) of each reward within its cell, the unbiased deviation, over all ranks."""
    import torch

    empty = rewards.new_zeros(num_cells)
    count = sum_over_ranks(empty.index_add(0, cell, torch.ones_like(rewards)))
    mean = sum_over_ranks(empty.index_add(0, cell, rewards)) / count.clamp(min=1)
    centred = rewards - mean[cell]
    squares = sum_over_ranks(empty.index_add(0, cell, centred.square()))
    return centred / ((squares / (count - 1).clamp(min=1)).sqrt()[cell] + EPS)
