"""`--reward ifeval`: whether the response follows the row's verifiable instructions (Zhou et al. 2023, 2311.07911)."""

from __future__ import annotations

import argparse

from slime_core import Sample, hookimpl
from slime_rm_text.answer import without_thinking
from slime_rm_text.ifeval.instructions import follows, instructions_of
from slime_rm_text.ifeval.language import LanguageDetector
from slime_rm_text.ifeval.loose import variants


class IFEval:
    """Keeps the language profiles, which are loaded with the first instruction about a language."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._loose: bool = args.ifeval_mode == "loose"
        self._partial: bool = args.ifeval_partial
        self._detector = LanguageDetector()

    @staticmethod
    @hookimpl
    def add_options(parser: argparse._ArgumentGroup) -> None:
        """The reward's flags."""
        parser.add_argument(
            "--ifeval-mode",
            choices=["strict", "loose"],
            default="strict",
            help="loose: an instruction also counts when the response follows it without its first or last line or its "
            "asterisks",
        )
        parser.add_argument(
            "--ifeval-partial",
            action="store_true",
            help="the reward is the share of instructions followed (default: 1 for all of them, else 0)",
        )

    @hookimpl
    def reward(self, sample: Sample) -> dict[str, float]:
        """Return the reward, and the share of instructions followed.

        Raises:
            ValueError: when the row has no instructions, or one that is unknown or lacks what it needs.
        """
        instructions = instructions_of(sample)
        response = without_thinking(sample.response)
        texts = variants(response) if self._loose else [response]
        followed = [any(follows(one, text, self._detector) for text in texts) for one in instructions]
        share = sum(followed) / len(followed)
        return {"reward": share if self._partial else float(all(followed)), "followed": share}
