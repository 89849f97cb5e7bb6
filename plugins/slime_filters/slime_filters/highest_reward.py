"""`--buffer-filter highest_reward`: the waiting groups with the highest rewards are taken first."""

from __future__ import annotations

import argparse
import math
from statistics import fmean

from slime_core import Group, hookimpl
from slime_filters.scores import add_reward_option, rewards_of


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The filter's flags."""
    parser.add_argument(
        "--highest-reward-by",
        choices=["mean", "max"],
        default="mean",
        help="a group's reward: the mean over its scored samples, or the best one's",
    )
    add_reward_option(parser, "highest-reward")


@hookimpl
def buffer_filter(args: argparse.Namespace, groups: list[Group], num_groups: int) -> list[Group]:
    """The `num_groups` of the highest reward; equal ones, and groups without any behind all, keep their order."""
    by, name = args.highest_reward_by, args.highest_reward_reward
    return sorted(groups, key=lambda group: group_reward(group, by, name), reverse=True)[:num_groups]


def group_reward(group: Group, by: str, name: str | None) -> float:
    """The mean or best reward of a group's scored samples; minus infinity where none is scored."""
    rewards = rewards_of(group, name)
    if not rewards:
        return -math.inf
    return fmean(rewards) if by == "mean" else max(rewards)
