"""`--dynamic-filter length_range`: drop groups whose responses are too short or too long, in tokens."""

from __future__ import annotations

import argparse
from statistics import fmean

from slime_core import Drop, Group, OptionError, flag_types, hookimpl
from slime_filters.scores import add_spare_option


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The filter's flags."""
    parser.add_argument(
        "--length-range-min", type=flag_types.non_negative_int, metavar="N", help="fewest response tokens"
    )
    parser.add_argument(
        "--length-range-max", type=flag_types.non_negative_int, metavar="N", help="most response tokens"
    )
    parser.add_argument(
        "--length-range-of",
        choices=["mean", "each"],
        default="mean",
        help="what must lie in the range: the group's mean length, or each sample's",
    )
    add_spare_option(parser, "length-range")


@hookimpl
def configure(args: argparse.Namespace) -> None:
    """Refuse a range that holds nothing or everything."""
    shortest, longest = args.length_range_min, args.length_range_max
    if shortest is None and longest is None:
        raise OptionError("--dynamic-filter length_range needs --length-range-min, --length-range-max or both.")
    if shortest is not None and longest is not None and shortest > longest:
        raise OptionError(f"--length-range-min {shortest} is above --length-range-max {longest}; no length fits.")


@hookimpl
def dynamic_filter(args: argparse.Namespace, samples: Group) -> Drop | None:
    """Drop the group as `too_short` or `too_long`; the bounds themselves are kept."""
    lengths: list[float] = [sample.response_length for sample in samples]
    if args.length_range_of == "mean" and lengths:
        lengths = [fmean(lengths)]
    if args.length_range_min is not None and min(lengths, default=args.length_range_min) < args.length_range_min:
        return Drop("too_short", spare=args.length_range_spare)
    if args.length_range_max is not None and max(lengths, default=0) > args.length_range_max:
        return Drop("too_long", spare=args.length_range_spare)
    return None
