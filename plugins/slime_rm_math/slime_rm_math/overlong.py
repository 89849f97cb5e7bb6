"""`--reward dapo +overlong`: DAPO's soft overlong punishment (arXiv 2503.14476, equation 13)."""

from __future__ import annotations

import argparse

from slime_core import OptionError, Sample, hookimpl

CACHE_SHARE = 5
"""The paper's buffer, 4,096 of 20,480 tokens, is a fifth."""


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The punishment's flags."""
    parser.add_argument(
        "--overlong-max-tokens",
        type=int,
        metavar="N",
        help="L_max, response tokens that cost the full 1 (default: --max-response-tokens)",
    )
    parser.add_argument(
        "--overlong-cache-tokens",
        type=int,
        metavar="N",
        help="L_cache, tokens below L_max in which the punishment grows from 0 (default: a fifth of L_max)",
    )


@hookimpl
def configure(args: argparse.Namespace) -> None:
    """Refuse a buffer that does not fit below the limit."""
    longest, cache = limits(args)
    if not 0 < cache <= longest:
        raise OptionError(f"--overlong-cache-tokens {cache} must be at least 1 and at most the {longest} of L_max.")


@hookimpl
def reward(args: argparse.Namespace, sample: Sample) -> float:
    """Return 0 up to L_max - L_cache tokens, then (L_max - L_cache - length) / L_cache, and -1 beyond L_max."""
    longest, cache = limits(args)
    return -min(1.0, max(0.0, (sample.response_length - (longest - cache)) / cache))


def limits(args: argparse.Namespace) -> tuple[int, int]:
    """L_max and L_cache in response tokens."""
    longest = int(args.overlong_max_tokens or args.max_response_tokens)
    cache = args.overlong_cache_tokens
    return longest, max(1, longest // CACHE_SHARE) if cache is None else int(cache)
