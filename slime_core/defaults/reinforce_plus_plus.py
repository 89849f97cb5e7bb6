"""`--advantage-estimator reinforce_plus_plus`: returns of a token, whitened over the round; no group needed."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from slime_core import OptionError, hookimpl

if TYPE_CHECKING:
    import torch


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The estimator's flags."""
    parser.add_argument(
        "--reinforce-plus-plus-gamma", type=float, default=1.0, metavar="X", help="discount a trained token"
    )


@hookimpl
def configure(args: argparse.Namespace) -> None:
    """Refuse a discount that makes no sense."""
    if not 0 <= args.reinforce_plus_plus_gamma <= 1:
        raise OptionError(f"--reinforce-plus-plus-gamma {args.reinforce_plus_plus_gamma} is not a number from 0 to 1.")


@hookimpl
def estimate_advantages(args: argparse.Namespace, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The return-to-go of each token, whitened over the trained tokens of the round, and the return itself.

    Hu et al., "REINFORCE++" (arXiv 2501.03262): the reward is that of the last trained token, every token pays its KL
    penalty (`--kl-coef`), and the whole round is the baseline. A sample without a reward has no advantage.
    """
    from slime_core.algorithms import at_last_token, discounted_returns, whiten

    mask = batch.loss_mask & batch.expand(~batch.rewards.isnan())
    rewards = at_last_token(batch.rewards.float(), mask, batch.response_lengths) - batch.kl_penalty
    returns = discounted_returns(rewards, mask, batch.response_lengths, args.reinforce_plus_plus_gamma)
    return whiten(returns, mask, sum_over_ranks=batch.sum_over_ranks), returns
