"""`--policy-loss ppo_clip`: PPO's clipped surrogate, with a range that may be wider upwards."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from slime_core import OptionError, SlimeError, hookimpl

if TYPE_CHECKING:
    import torch


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The loss's flags."""
    parser.add_argument(
        "--ppo-clip-eps", type=float, default=0.2, metavar="X", help="how far the ratio may fall below 1"
    )
    parser.add_argument(
        "--ppo-clip-eps-high", type=float, metavar="X", help="how far it may rise above 1 (default: --ppo-clip-eps)"
    )


@hookimpl
def configure(args: argparse.Namespace) -> None:
    """Refuse a range that makes no sense."""
    if not 0 <= args.ppo_clip_eps <= 1:
        raise OptionError(f"--ppo-clip-eps {args.ppo_clip_eps} is not a number from 0 to 1.")
    if args.ppo_clip_eps_high is not None and not args.ppo_clip_eps_high >= 0:
        raise OptionError(f"--ppo-clip-eps-high {args.ppo_clip_eps_high} is not a number of at least 0.")


@hookimpl
def policy_loss(
    args: argparse.Namespace, batch: Any, logprobs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped surrogate of each token, with the clipped fraction and an estimate of KL(old || new)."""
    from slime_core.algorithms import importance_ratio, kl_estimate, ppo_clip_loss

    if batch.advantages is None:
        raise SlimeError(
            "the policy loss ppo_clip needs advantages, but no sample has a reward; name one with --reward."
        )
    high = args.ppo_clip_eps if args.ppo_clip_eps_high is None else args.ppo_clip_eps_high
    ratio = importance_ratio(logprobs, batch.old_logprobs)
    loss, clipped = ppo_clip_loss(ratio, batch.advantages, args.ppo_clip_eps, high)
    return loss, {
        "clip_fraction": clipped.float(),
        "ppo_kl": kl_estimate(batch.old_logprobs, logprobs.detach(), "k1"),
    }
