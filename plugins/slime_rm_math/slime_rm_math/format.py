r"""`--reward math +format=0.1`: whether the response has the wanted form, whatever its answer."""

from __future__ import annotations

import argparse
import re

from slime_core import OptionError, Sample, hookimpl
from slime_rm_math.deepscaler import opens_thinking
from slime_rm_math.extract import BOX, last_boxed

THINK = re.compile(r"\s*<think>((?:(?!</?think>).)*)</think>((?:(?!</?think>).)*)", re.DOTALL)


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The reward's flags."""
    parser.add_argument(
        "--format-wants",
        nargs="+",
        choices=["think", "boxed"],
        default=["think"],
        help="think: one <think>...</think>, then an answer; boxed: one \\boxed{} behind the thinking (default: think)",
    )
    parser.add_argument(
        "--format-pattern", metavar="REGEX", help="what the whole response must match instead (`.` matches newlines)"
    )


@hookimpl
def configure(args: argparse.Namespace) -> None:
    """Refuse a pattern that is no regular expression."""
    try:
        re.compile(args.format_pattern or "")
    except re.error as error:
        raise OptionError(f"--format-pattern is no regular expression: {error}") from None


@hookimpl
def reward(args: argparse.Namespace, sample: Sample) -> float:
    """Return 1.0 when the response has the wanted form, else 0.0."""
    if args.format_pattern:
        return float(re.fullmatch(args.format_pattern, sample.response, re.DOTALL) is not None)
    response = f"<think>{sample.response}" if opens_thinking(sample.prompt) else sample.response
    match = THINK.fullmatch(response)
    answer = match[2] if match else response
    fine = {"think": bool(match and match[1].strip() and answer.strip()), "boxed": bool(has_one_box(answer))}
    return float(all(fine[wanted] for wanted in args.format_wants))


def has_one_box(text: str) -> bool:
    """Whether there is exactly one box, closed and not empty."""
    return len(BOX.findall(text)) == 1 and bool(last_boxed(text))
