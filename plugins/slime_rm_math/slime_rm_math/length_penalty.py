"""`--reward math +length_penalty=0.1`: from 0 for a short response down to -1 for one of full length."""

from __future__ import annotations

import argparse

from slime_core import OptionError, Sample, hookimpl


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The penalty's flags."""
    parser.add_argument(
        "--length-penalty-free-tokens", type=int, default=0, metavar="N", help="response tokens that cost nothing"
    )
    parser.add_argument(
        "--length-penalty-max-tokens",
        type=int,
        metavar="N",
        help="response tokens that cost the full 1 (default: --max-response-tokens)",
    )


@hookimpl
def configure(args: argparse.Namespace) -> None:
    """Refuse limits without room between them."""
    longest = max_tokens(args)
    if not 0 <= args.length_penalty_free_tokens < longest:
        raise OptionError(
            f"--length-penalty-free-tokens {args.length_penalty_free_tokens} must be at least 0 and less than "
            f"the {longest} tokens that cost the full penalty."
        )


@hookimpl
def reward(args: argparse.Namespace, sample: Sample) -> float:
    """Return 0.0 up to the free tokens, then a straight line to -1.0 at the most tokens."""
    free = args.length_penalty_free_tokens
    share: float = (sample.response_length - free) / (max_tokens(args) - free)
    return -min(1.0, max(0.0, share))


def max_tokens(args: argparse.Namespace) -> int:
    """Response tokens at which the penalty is full."""
    return int(args.length_penalty_max_tokens or args.max_response_tokens)
