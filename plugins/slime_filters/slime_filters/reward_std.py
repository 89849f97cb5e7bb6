"""`--over-sampling-filter reward_std`: the groups whose rewards differ most come first."""

from __future__ import annotations

import argparse
from statistics import fmean, pstdev

from slime_core import Group, hookimpl
from slime_filters.scores import add_reward_option, reward_of


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The filter's one flag."""
    add_reward_option(parser, "reward-std")


@hookimpl
def over_sampling_filter(args: argparse.Namespace, groups: list[Group]) -> list[Group]:
    """All groups by standard deviation of their rewards, largest first; equal ones keep their order."""
    return sorted(groups, key=lambda group: reward_std(group, args.reward_std_reward), reverse=True)


def reward_std(group: Group, name: str | None = None) -> float:
    """Population standard deviation over the rollouts of a group; -1 where none has a reward.

    Samples that one rollout fanned out count once, with their mean.
    """
    rollouts: dict[tuple[str, int], list[float]] = {}
    for position, sample in enumerate(group):
        reward = reward_of(sample, name)
        if reward is not None:
            numbered = sample.rollout_index >= 0
            key = ("rollout", sample.rollout_index) if numbered else ("position", position)
            rollouts.setdefault(key, []).append(reward)
    return pstdev([fmean(rewards) for rewards in rollouts.values()]) if rollouts else -1.0
