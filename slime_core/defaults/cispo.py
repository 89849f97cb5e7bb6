"""`--policy-loss cispo`: REINFORCE with clipped importance weights, in which every token keeps its gradient."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from slime_core import OptionError, hookimpl

if TYPE_CHECKING:
    import torch


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The loss's flags."""
    parser.add_argument(
        "--cispo-clip-eps", type=float, default=1.0, metavar="X", help="how far a weight may fall below 1; 1: no bound"
    )
    parser.add_argument(
        "--cispo-clip-eps-high", type=float, default=4.0, metavar="X", help="how far it may rise above 1"
    )


@hookimpl
def configure(args: argparse.Namespace) -> None:
    """Refuse a range that makes no sense."""
    if not 0 <= args.cispo_clip_eps <= 1:
        raise OptionError(f"--cispo-clip-eps {args.cispo_clip_eps} is not a number from 0 to 1.")
    if not args.cispo_clip_eps_high >= 0:
        raise OptionError(f"--cispo-clip-eps-high {args.cispo_clip_eps_high} is not a number of at least 0.")


@hookimpl
def policy_loss(
    args: argparse.Namespace, batch: Any, logprobs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-weight * advantage * log p of each token, with the clipped fraction and an estimate of KL(old || new).

    MiniMax, "MiniMax-M1" (arXiv 2506.13585), equations 4 and 5; see `algorithms.cispo_loss`.
    """
    from slime_core.algorithms import cispo_loss, kl_estimate

    loss, clipped = cispo_loss(
        logprobs, batch.old_logprobs, batch.known_advantages, args.cispo_clip_eps, args.cispo_clip_eps_high
    )
    return loss, {
        "clip_fraction": clipped.float(),
        "ppo_kl": kl_estimate(batch.old_logprobs, logprobs.detach(), "k1"),
    }
