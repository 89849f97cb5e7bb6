"""`--over-sampling-filter reward_std`: the groups whose rewards differ most come first."""

from __future__ import annotations

from statistics import fmean, pstdev

from slime_core import Group, hookimpl


@hookimpl
def over_sampling_filter(groups: list[Group]) -> list[Group]:
    """All groups by standard deviation of their rewards, largest first; equal ones keep their order."""
    return sorted(groups, key=reward_std, reverse=True)


def reward_std(group: Group) -> float:
    """Population standard deviation over the rollouts of a group; -1 where none has a reward.

    Samples that one rollout fanned out count once, with their mean.
    """
    rollouts: dict[tuple[str, int], list[float]] = {}
    for position, sample in enumerate(group):
        if sample.reward is not None:
            numbered = sample.rollout_index >= 0
            key = ("rollout", sample.rollout_index) if numbered else ("position", position)
            rollouts.setdefault(key, []).append(sample.reward)
    return pstdev([fmean(rewards) for rewards in rollouts.values()]) if rollouts else -1.0
