"""`--dynamic-filter not_truncated`: drop groups in which too many responses ended for length."""

from __future__ import annotations

import argparse

from slime_core import Drop, Group, Status, flag_types, hookimpl
from slime_filters.scores import add_spare_option


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The filter's flags."""
    parser.add_argument(
        "--not-truncated-max-fraction",
        type=flag_types.fraction,
        default=0.0,
        metavar="X",
        help="truncated samples that a group may have",
    )
    add_spare_option(parser, "not-truncated")


@hookimpl
def dynamic_filter(args: argparse.Namespace, samples: Group) -> Drop | None:
    """Drop the group when more of its samples than allowed are TRUNCATED."""
    num_truncated = sum(sample.status is Status.TRUNCATED for sample in samples)
    if num_truncated <= args.not_truncated_max_fraction * len(samples):
        return None
    return Drop("truncated", spare=args.not_truncated_spare)
