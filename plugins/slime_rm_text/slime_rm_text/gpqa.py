"""`--reward gpqa`: 1 when the response chooses the label's option, else 0."""

from __future__ import annotations

import argparse
from typing import Any

from slime_core import Sample, hookimpl
from slime_rm_text.answer import without_thinking
from slime_rm_text.choice import chosen_letter, letter_of
from slime_rm_text.normalize import normalized

LETTERS = "ABCDEFGHIJ"


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The reward's one flag."""
    parser.add_argument(
        "--gpqa-choices-key",
        default="choices",
        metavar="KEY",
        help="metadata field with the options: a list of texts, or an object from letter to text",
    )


@hookimpl
def reward(args: argparse.Namespace, sample: Sample) -> float:
    """Return 1.0 when the option that the response settles on is the label's, or one of a list of labels, else 0.0.

    Raises:
        ValueError: when the label names no option.
    """
    choices = options_by_letter(sample.metadata.get(args.gpqa_choices_key))
    right = right_letters(sample.label, choices)
    return float(chosen_letter(without_thinking(sample.response), "".join(choices) or LETTERS, choices) in right)


def options_by_letter(choices: Any) -> dict[str, str]:
    """Letter -> text of a row's options; empty when the row lists none.

    Raises:
        ValueError: when they are no list and no object of texts.
    """
    if choices is None:
        return {}
    if isinstance(choices, dict):
        choices = {str(letter).strip().upper(): text for letter, text in choices.items()}
        if all(len(letter) == 1 and letter.isalpha() for letter in choices):
            return {letter: str(text) for letter, text in choices.items()}
    elif isinstance(choices, list | tuple) and 0 < len(choices) <= 26:
        return {chr(ord("A") + i): str(text) for i, text in enumerate(choices)}
    raise ValueError("the row's choices are neither a list of texts nor an object from letter to text")


def right_letters(label: Any, choices: dict[str, str]) -> set[str]:
    """The letters that a label accepts: a letter, an index counted from 0, an option's text, or a list of these.

    Raises:
        ValueError: when one of them names no option.
    """
    labels = label if isinstance(label, list | tuple) else [label]
    if not labels:
        raise ValueError("the label is an empty list; give at least one right option")
    return {_right_letter(one, choices) for one in labels}


def _right_letter(label: Any, choices: dict[str, str]) -> str:
    letters = "".join(choices) or LETTERS
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(letters):
        return letters[label]
    if isinstance(label, str):
        if letter := letter_of(label, letters):
            return letter
        same = [letter for letter, text in choices.items() if normalized(text) == normalized(label)]
        if len(same) == 1 and normalized(label):
            return same[0]
    raise ValueError(
        f"the label {label!r} names no option; a label is a letter ({letters[0]}-{letters[-1]}), an index counted "
        "from 0, or the text of one of the row's choices (--gpqa-choices-key)"
    )
