r"""Rewards for mathematics. `--reward math`: the last \boxed{} of the response against the label."""

from __future__ import annotations

import argparse

from slime_core import Sample, hookimpl
from slime_rm_math.compare import same_answer
from slime_rm_math.extract import accepted_answers, boxed_answers, last_boxed, stated_answers

__all__ = ["accepted_answers", "add_options", "boxed_answers", "is_right", "last_boxed", "reward", "same_answer"]


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The reward's one flag."""
    parser.add_argument(
        "--math-extract",
        choices=["boxed", "anywhere"],
        default="boxed",
        help="where the answer is: in the last \\boxed{}, or without a box in what the response states last",
    )


@hookimpl
def reward(args: argparse.Namespace, sample: Sample) -> float:
    """Return 1.0 when the response's answer equals the label or one of a list of labels, else 0.0.

    Raises:
        ValueError: when the label cannot be compared with anything; the sample is then FAILED, not wrong.
    """
    return float(is_right(sample.response, sample.label, anywhere=args.math_extract == "anywhere"))


def is_right(response: str, label: object, anywhere: bool = False) -> bool:
    r"""Whether a response's boxed answer is one that the label accepts; `anywhere` also reads responses without a box.

    Raises:
        ValueError: when the label cannot be compared with anything.
    """
    accepted = accepted_answers(label)
    answers = stated_answers(response) if anywhere else boxed_answers(response)
    return any(same_answer(answer, known) for answer in answers for known in accepted)
