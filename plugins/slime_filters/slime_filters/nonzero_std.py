"""`--dynamic-filter nonzero_std`: drop groups whose rewards are all equal, because they teach nothing."""

from __future__ import annotations

import argparse

from slime_core import Drop, Group, hookimpl
from slime_filters.scores import TOLERANCE, add_reward_option, add_spare_option, rewards_of


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The filter's flags."""
    add_reward_option(parser, "nonzero-std")
    add_spare_option(parser, "nonzero-std")


@hookimpl
def dynamic_filter(args: argparse.Namespace, samples: Group) -> Drop | None:
    """Drop the group when its scored samples, of which there may be any number, have equal rewards."""
    rewards = rewards_of(samples, args.nonzero_std_reward)
    if not rewards:
        return Drop("no_reward")
    if max(rewards) - min(rewards) > TOLERANCE:
        return None
    return Drop(f"zero_std_{round(rewards[0], 1) + 0.0:g}", spare=args.nonzero_std_spare)
