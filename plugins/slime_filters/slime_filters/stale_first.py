"""`--buffer-filter stale_first`: waiting groups with the oldest tokens are taken first, before they grow too old."""

from __future__ import annotations

import argparse
import math

import numpy as np

from slime_core import Group, hookimpl


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The filter's one flag."""
    parser.add_argument(
        "--stale-first-by",
        choices=["oldest", "mean"],
        default="oldest",
        help="a group's age: that of its oldest token, or the mean over its tokens",
    )


@hookimpl
def buffer_filter(args: argparse.Namespace, groups: list[Group], num_groups: int) -> list[Group]:
    """The `num_groups` of the oldest weight versions; equal ones, and fresh prompts behind all, keep their order."""
    return sorted(groups, key=lambda group: weight_version(group, args.stale_first_by))[:num_groups]


def weight_version(group: Group, by: str) -> float:
    """The version that a group's tokens come from; infinite where no engine has made a token of it yet."""
    versions = np.concatenate([np.empty(0, np.int32), *(sample.weight_versions for sample in group)])
    made = versions[versions >= 0]
    if not len(made):
        return math.inf
    return float(made.min() if by == "oldest" else made.mean())
