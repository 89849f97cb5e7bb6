"""`--dynamic-filter pass_rate_range`: drop groups whose share of correct samples says too easy or too hard."""

from __future__ import annotations

import argparse

from slime_core import Drop, Group, OptionError, flag_types, hookimpl
from slime_filters.scores import (
    TOLERANCE,
    add_reward_option,
    add_spare_option,
    add_threshold_option,
    rewards_of,
)


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The filter's flags; with the defaults only groups that are all wrong or all right go."""
    parser.add_argument(
        "--pass-rate-range-min",
        type=flag_types.fraction,
        default=0.001,
        metavar="X",
        help="smallest share of correct samples",
    )
    parser.add_argument(
        "--pass-rate-range-max",
        type=flag_types.fraction,
        default=0.999,
        metavar="X",
        help="largest share of correct samples",
    )
    add_threshold_option(parser, "pass-rate-range")
    add_reward_option(parser, "pass-rate-range")
    add_spare_option(parser, "pass-rate-range")


@hookimpl
def configure(args: argparse.Namespace) -> None:
    """Refuse a range that holds nothing."""
    if args.pass_rate_range_min > args.pass_rate_range_max:
        raise OptionError(
            f"--pass-rate-range-min {args.pass_rate_range_min:g} is above --pass-rate-range-max "
            f"{args.pass_rate_range_max:g}; no group fits."
        )


@hookimpl
def dynamic_filter(args: argparse.Namespace, samples: Group) -> Drop | None:
    """Drop the group as `too_hard` or `too_easy`; the bounds themselves are kept."""
    rewards = rewards_of(samples, args.pass_rate_range_reward)
    if not rewards:
        return Drop("no_reward")
    rate = sum(reward >= args.pass_rate_range_threshold - TOLERANCE for reward in rewards) / len(rewards)
    if rate < args.pass_rate_range_min - TOLERANCE:
        return Drop("too_hard", spare=args.pass_rate_range_spare)
    if rate > args.pass_rate_range_max + TOLERANCE:
        return Drop("too_easy", spare=args.pass_rate_range_spare)
    return None
