r"""Reward for mathematics: the last \boxed{} of the response against the label."""

from __future__ import annotations

import argparse

from slime_core import Sample, hookimpl
from slime_rm_math.compare import same_answer
from slime_rm_math.extract import accepted_answers, last_boxed

__all__ = ["accepted_answers", "last_boxed", "reward", "same_answer"]


@hookimpl
def reward(args: argparse.Namespace, sample: Sample) -> float:
    """Return 1.0 when the response's last boxed answer equals the label or one of a list of labels, else 0.0.

    Raises:
        ValueError: when the label cannot be compared with anything; the sample is then FAILED, not wrong.
    """
    accepted = accepted_answers(sample.label)
    answer = last_boxed(sample.response)
    if answer is None:
        return 0.0
    return float(any(same_answer(answer, label) for label in accepted))
