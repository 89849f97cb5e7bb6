"""`--advantage-estimator ppo`: generalised advantage estimation with a critic."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from slime_core import OptionError, SlimeError, hookimpl

if TYPE_CHECKING:
    import torch


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The estimator's flags."""
    parser.add_argument("--ppo-gamma", type=float, default=1.0, metavar="X", help="discount a trained token")
    parser.add_argument(
        "--ppo-lambda", type=float, default=1.0, metavar="X", help="from 0 (one step) to 1 (returns less values)"
    )


@hookimpl
def configure(args: argparse.Namespace) -> None:
    """Refuse numbers that make no sense, and a run without a critic."""
    if not args.critic:
        raise OptionError("--advantage-estimator ppo needs a critic; add --critic.")
    for flag, value in {"--ppo-gamma": args.ppo_gamma, "--ppo-lambda": args.ppo_lambda}.items():
        if not 0 <= value <= 1:
            raise OptionError(f"{flag} {value} is not a number from 0 to 1.")


@hookimpl
def estimate_advantages(args: argparse.Namespace, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE of rewards that are the sample's on its last trained token, less every token's KL penalty; and returns.

    Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (arXiv 1506.02438),
    equation 16; see `algorithms.gae`. A sample without a reward has no advantage.
    """
    from slime_core.algorithms import at_last_token, gae

    if batch.values is None:
        raise SlimeError("the estimator ppo needs a critic's values; add --critic.")
    mask = batch.loss_mask & batch.expand(~batch.rewards.isnan())
    rewards = at_last_token(batch.rewards.float(), mask, batch.response_lengths) - batch.kl_penalty
    return gae(rewards, batch.values, mask, batch.response_lengths, args.ppo_gamma, args.ppo_lambda)
