r"""`--reward dapo`: DAPO's reward, the last `Answer:` line of the response against the label, as +1 or -1."""

from __future__ import annotations

import argparse
import re

from slime_core import Sample, hookimpl
from slime_rm_math.extract import accepted_answers, last_boxed
from slime_rm_math.number import parse_number

TAIL = 300
"""Characters at the end of a response that are searched (DAPO, arXiv 2503.14476, as released)."""

MAX_LENGTH = 1000

_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")

# Minerva's normalisation (Lewkowycz et al., arXiv 2206.14858, appendix D.1): texts that are replaced, then removed.
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *(
        "childrentickets",
        "multiples",
        r"\text{s}",
        r"\text{.}",
        "\\text{\ns}",
        r"\text{}^2",
        r"\text{}^3",
        "\\text{\n}",
    ),
    *(r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
_UNWRAPPED = (
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),
    (re.compile(r"(\\text\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\textbf\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\overline\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\boxed\{)(.*)(\})"), r"\2"),
    (re.compile(r"(frac)([^{])(.)"), r"frac{\2}{\3}"),
    (re.compile(r"(sqrt)([^{])"), r"sqrt{\2}"),
)


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The reward's one flag."""
    parser.add_argument(
        "--dapo-boxed",
        action="store_true",
        help="take the answer from the last \\boxed{}, wherever it is, not from an `Answer:` line at the end",
    )


@hookimpl
def reward(args: argparse.Namespace, sample: Sample) -> dict[str, float]:
    """Return reward 1.0 when the stated answer is the label, else -1.0, and `acc` as 1.0 or 0.0.

    Raises:
        ValueError: when the label cannot be compared with anything.
    """
    accepted = [normalize(label) for label in accepted_answers(sample.label)]
    stated = last_boxed(sample.response) if args.dapo_boxed else answer_line(sample.response)
    prediction = "" if stated is None else normalize(stated)
    right = any(same_text_or_number(prediction, label) for label in accepted)
    return {"reward": 1.0 if right else -1.0, "acc": float(right)}


def answer_line(response: str) -> str | None:
    """What follows the last `Answer:` near the end; None where there is none."""
    found = _ANSWER.findall(response[-TAIL:])
    return found[-1].strip() if found else None


def same_text_or_number(prediction: str, label: str) -> bool:
    """Equal as texts, or exactly as numbers: `7.0` is `7`, `2.5` is not `2`."""
    if prediction == label:
        return prediction != ""
    left, right = parse_number(prediction), parse_number(label)
    return left is not None and right is not None and left == right._replace(places=left.places)


def normalize(answer: str) -> str:
    """Minerva's spelling of a final answer; texts too long to be one stay as they are."""
    if len(answer) > MAX_LENGTH:
        return answer
    text = answer.rpartition("=")[2]
    for written, replacement in _REPLACED:
        text = text.replace(written, replacement)
    for written in _REMOVED:
        text = text.replace(written, "")
    for pattern, replacement in _UNWRAPPED:
        text = pattern.sub(replacement, text)
    text = text.replace("$", "")
    without_commas = text.replace(",", "")
    return (without_commas if without_commas.isdigit() else text).strip()
