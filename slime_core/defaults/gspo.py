"""`--policy-loss gspo`: the clipped surrogate of a whole sequence's importance ratio."""

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
        "--gspo-clip-eps", type=float, default=3e-4, metavar="X", help="how far a sequence's ratio may fall below 1"
    )
    parser.add_argument(
        "--gspo-clip-eps-high", type=float, default=4e-4, metavar="X", help="how far it may rise above 1"
    )


@hookimpl
def configure(args: argparse.Namespace) -> None:
    """Refuse a range that makes no sense."""
    if not 0 <= args.gspo_clip_eps <= 1:
        raise OptionError(f"--gspo-clip-eps {args.gspo_clip_eps} is not a number from 0 to 1.")
    if not args.gspo_clip_eps_high >= 0:
        raise OptionError(f"--gspo-clip-eps-high {args.gspo_clip_eps_high} is not a number of at least 0.")


@hookimpl
def policy_loss(
    args: argparse.Namespace, batch: Any, logprobs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped surrogate with the sequence's ratio at each of its tokens, with the clipped fraction and a KL.

    Zheng et al., "Group Sequence Policy Optimization" (arXiv 2507.18071), equation 13, which is equation 5 where the
    advantages of a sequence are equal; the defaults of the range are the paper's. With `--loss-aggregation sequence`
    every sequence weighs the same, as there. See `algorithms.sequence_ratio`.
    """
    from slime_core.algorithms import kl_estimate, ppo_clip_loss, sequence_ratio

    ratio = sequence_ratio(logprobs, batch.old_logprobs, batch.loss_mask, batch.response_lengths)
    loss, clipped = ppo_clip_loss(ratio, batch.known_advantages, args.gspo_clip_eps, args.gspo_clip_eps_high)
    return loss, {
        "clip_fraction": clipped.float(),
        "ppo_kl": kl_estimate(batch.old_logprobs, logprobs.detach(), "k1"),
    }
