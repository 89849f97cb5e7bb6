"""`--dynamic-filter nonzero_std`: drop groups whose rewards are all equal, because they teach nothing."""

from __future__ import annotations

import argparse

from slime_core import Drop, Group, hookimpl

TOLERANCE = 1e-6
"""Rewards closer than this are equal: sums of weighted rewards carry rounding."""


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The filter's one flag."""
    parser.add_argument(
        "--nonzero-std-spare", action="store_true", help="use dropped groups after all when too few remain"
    )


@hookimpl
def dynamic_filter(args: argparse.Namespace, samples: Group) -> Drop | None:
    """Drop the group when its scored samples, of which there may be any number, have equal rewards."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if not rewards:
        return Drop("no_reward")
    if max(rewards) - min(rewards) > TOLERANCE:
        return None
    return Drop(f"zero_std_{round(rewards[0], 1) + 0.0:g}", spare=args.nonzero_std_spare)
