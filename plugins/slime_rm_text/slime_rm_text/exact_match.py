"""`--reward exact_match`: 1 when the response is the label, else 0."""

from __future__ import annotations

import argparse

from slime_core import Sample, hookimpl
from slime_rm_text.answer import add_source_option, answer_from
from slime_rm_text.labels import accepted_texts
from slime_rm_text.normalize import comparable


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The reward's flags."""
    add_source_option(parser, "exact-match")
    parser.add_argument(
        "--exact-match-normalize",
        choices=["squad", "space", "none"],
        default="squad",
        help="before comparing: case, punctuation and articles go; only outer and repeated space; nothing",
    )


@hookimpl
def reward(args: argparse.Namespace, sample: Sample) -> float:
    """Return 1.0 when the response equals one of the label's accepted texts, else 0.0.

    Raises:
        ValueError: when the label cannot be compared with anything.
    """
    accepted = accepted_texts(sample.label)
    answer = answer_from(sample.response, args.exact_match_from)
    return float(answer is not None and any(same(answer, text, args.exact_match_normalize) for text in accepted))


def same(answer: str, truth: str, normalize: str) -> bool:
    """Whether two texts are equal after a normalisation of `--exact-match-normalize`."""
    if normalize == "squad":
        ours, theirs = comparable(answer, truth)
        return ours == theirs
    return answer.split() == truth.split() if normalize == "space" else answer == truth
