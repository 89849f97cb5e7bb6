"""`--reward f1`: how many words the response and the label share, as their F1 from 0 to 1."""

from __future__ import annotations

import argparse
from collections import Counter

from slime_core import Sample, hookimpl
from slime_rm_text.answer import add_source_option, answer_from
from slime_rm_text.labels import accepted_texts
from slime_rm_text.normalize import comparable

VERDICTS = {"yes", "no", "noanswer"}


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The reward's one flag."""
    add_source_option(parser, "f1")


@hookimpl
def reward(args: argparse.Namespace, sample: Sample) -> float:
    """Return the best F1 over the label's accepted texts.

    Raises:
        ValueError: when the label cannot be compared with anything.
    """
    accepted = accepted_texts(sample.label)
    answer = answer_from(sample.response, args.f1_from)
    return 0.0 if answer is None else max(f1(answer, text) for text in accepted)


def f1(answer: str, truth: str) -> float:
    """F1 of the two texts' words, counted with repetition, after normalisation (SQuAD, Rajpurkar et al. 2016).

    Where one of them is yes, no or noanswer they must be equal (HotpotQA, Yang et al. 2018).
    """
    ours, theirs = comparable(answer, truth)
    if ours != theirs and (ours in VERDICTS or theirs in VERDICTS):
        return 0.0
    words, wanted = ours.split(), theirs.split()
    shared = (Counter(words) & Counter(wanted)).total()
    return 2 * shared / (len(words) + len(wanted))
