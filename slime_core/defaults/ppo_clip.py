"""`--policy-loss ppo_clip`: PPO's clipped surrogate, with a range that may be wider upwards, and dual clip."""

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
        "--ppo-clip-eps", type=float, default=0.2, metavar="X", help="how far the ratio may fall below 1"
    )
    parser.add_argument(
        "--ppo-clip-eps-high", type=float, metavar="X", help="how far it may rise above 1 (default: --ppo-clip-eps)"
    )
    parser.add_argument(
        "--ppo-clip-dual", type=float, metavar="X", help="largest ratio that counts where the advantage is negative"
    )


@hookimpl
def configure(args: argparse.Namespace) -> None:
    """Refuse a range that makes no sense."""
    if not 0 <= args.ppo_clip_eps <= 1:
        raise OptionError(f"--ppo-clip-eps {args.ppo_clip_eps} is not a number from 0 to 1.")
    if args.ppo_clip_eps_high is not None and not args.ppo_clip_eps_high >= 0:
        raise OptionError(f"--ppo-clip-eps-high {args.ppo_clip_eps_high} is not a number of at least 0.")
    if args.ppo_clip_dual is not None and not args.ppo_clip_dual > 1:
        raise OptionError(f"--ppo-clip-dual {args.ppo_clip_dual} is not a number above 1.")


@hookimpl
def policy_loss(
    args: argparse.Namespace, batch: Any, logprobs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped surrogate of each token, with the clipped fraction and an estimate of KL(old || new).

    Schulman et al. (arXiv 1707.06347), equation 7; asymmetric as in DAPO (arXiv 2503.14476), equation 10; dual clip of
    Ye et al. (arXiv 1912.09729). See `algorithms.ppo_clip_loss` and `algorithms.dual_clip`.
    """
    from slime_core.algorithms import dual_clip, importance_ratio, kl_estimate, ppo_clip_loss

    advantages = batch.known_advantages
    high = args.ppo_clip_eps if args.ppo_clip_eps_high is None else args.ppo_clip_eps_high
    ratio = importance_ratio(logprobs, batch.old_logprobs)
    loss, clipped = ppo_clip_loss(ratio, advantages, args.ppo_clip_eps, high)
    metrics = {
        "clip_fraction": clipped.float(),
        "ppo_kl": kl_estimate(batch.old_logprobs, logprobs.detach(), "k1"),
    }
    if args.ppo_clip_dual is not None:
        loss, bounded = dual_clip(loss, advantages, args.ppo_clip_dual)
        metrics["dual_clip_fraction"] = bounded.float()
    return loss, metrics
