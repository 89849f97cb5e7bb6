"""What the filters look at: a sample's reward, whole or of one plugin, and the flags that say which."""

from __future__ import annotations

import argparse

from slime_core import Group, Sample

TOLERANCE = 1e-6
"""Rewards closer than this are equal: sums of weighted rewards carry rounding."""


def reward_of(sample: Sample, name: str | None) -> float | None:
    """The sample's reward, or with a name what that plugin gave before weighting; None where there is none."""
    return sample.reward if name is None else sample.rewards.get(name)


def rewards_of(samples: Group, name: str | None) -> list[float]:
    """The rewards of those samples that have one."""
    return [reward for sample in samples if (reward := reward_of(sample, name)) is not None]


def add_reward_option(parser: argparse._ArgumentGroup, plugin: str) -> None:
    """The flag `--<plugin>-reward`."""
    parser.add_argument(
        f"--{plugin}-reward",
        metavar="NAME",
        help="look at what this reward gave, unweighted (default: the whole reward)",
    )


def add_threshold_option(parser: argparse._ArgumentGroup, plugin: str) -> None:
    """The flag `--<plugin>-threshold`."""
    parser.add_argument(
        f"--{plugin}-threshold",
        type=float,
        default=1.0,
        metavar="X",
        help="a sample with at least this reward is correct",
    )


def add_spare_option(parser: argparse._ArgumentGroup, plugin: str) -> None:
    """The flag `--<plugin>-spare`."""
    parser.add_argument(
        f"--{plugin}-spare", action="store_true", help="use dropped groups after all when too few remain"
    )
