r"""`--reward deepscaler`: DeepScaleR's reward, the last \boxed{} behind the thinking, in the label's form."""

from __future__ import annotations

import argparse
import re
from typing import Any

from slime_core import Sample, hookimpl
from slime_rm_math.compare import same_answer
from slime_rm_math.extract import accepted_answers, last_boxed
from slime_rm_math.spelling import respell

DELIMITERS = ("</think>", "###Response")
OPENING = "<think>"

_INTEGER = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.0*)?")
_FRACTION = re.compile(r"-?(?:\\frac\{-?\d+\}\{-?\d+\}|\d+/\d+)")


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The reward's one flag."""
    parser.add_argument(
        "--deepscaler-require-think",
        action="store_true",
        help="give 0 to a response without </think>, as published, though its model may never think aloud",
    )


@hookimpl
def reward(args: argparse.Namespace, sample: Sample) -> float:
    """Return 1.0 when the box behind the thinking equals an accepted label in value and form, else 0.0.

    Raises:
        ValueError: when the label cannot be compared with anything.
    """
    accepted = accepted_answers(sample.label)
    solution = behind_thinking(sample.response, sample.prompt, args.deepscaler_require_think)
    answer = None if solution is None else last_boxed(solution)
    if answer is None:
        return 0.0
    return float(any(same_answer(answer, label) and same_form(answer, label) for label in accepted))


def behind_thinking(response: str, prompt: Any, required: bool) -> str | None:
    """What follows the last delimiter; the whole of a response that never thinks; None where thinking never ends."""
    for delimiter in DELIMITERS:
        if delimiter in response:
            return response.rpartition(delimiter)[2]
    return None if required or OPENING in response or opens_thinking(prompt) else response


def opens_thinking(prompt: Any) -> bool:
    """Whether the prompt ends inside a thinking block, as some chat templates make it."""
    last = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", "")) if prompt else ""
    return last.rstrip().endswith(OPENING)


def same_form(answer: str, label: str) -> bool:
    """An integer label wants an integer, a literal fraction the same fraction: `2/4` for `1/2` was not reduced."""
    given, truth = respell(answer).text, respell(label).text
    if _INTEGER.fullmatch(truth):
        return _INTEGER.fullmatch(given.partition("=")[2] or given) is not None
    if _FRACTION.fullmatch(truth) and _FRACTION.fullmatch(given):
        return re.findall(r"-?\d+", given.replace("/", " ")) == re.findall(r"-?\d+", truth.replace("/", " "))
    return True
