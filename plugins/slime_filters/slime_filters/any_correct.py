"""`--dynamic-filter any_correct`: drop groups without one correct sample."""

from __future__ import annotations

import argparse

from slime_core import Drop, Group, hookimpl
from slime_filters.scores import TOLERANCE, add_reward_option, add_spare_option, add_threshold_option, rewards_of


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The filter's flags."""
    add_threshold_option(parser, "any-correct")
    add_reward_option(parser, "any-correct")
    add_spare_option(parser, "any-correct")


@hookimpl
def dynamic_filter(args: argparse.Namespace, samples: Group) -> Drop | None:
    """Drop the group when no scored sample reaches the threshold."""
    rewards = rewards_of(samples, args.any_correct_reward)
    if not rewards:
        return Drop("no_reward")
    if max(rewards) >= args.any_correct_threshold - TOLERANCE:
        return None
    return Drop("none_correct", spare=args.any_correct_spare)
