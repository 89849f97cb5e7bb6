"""The score in a judge's answer."""

from __future__ import annotations

import argparse
import json
import math
import re

SCORE = r"(?i)\bscore\b[\"'*_\s]*[:=][\"'*_\s]*([-+]?\d+(?:\.\d+)?)"
"""Score: 7, **Score**: 7/10, "score": 7.5."""
END_OF_THINKING = "</think>"
SHOWN_CHARACTERS = 120


def score_pattern(text: str) -> str:
    """A flag's regular expression with at least one group."""
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"'{text}' is not a regular expression: {error}") from None
    if not pattern.groups:
        raise argparse.ArgumentTypeError(f"'{text}' has no group; put the score in parentheses")
    return text


class ScoreParser:
    """Finds a score by a pattern, or under a key of a JSON object, within a range."""

    def __init__(self, pattern: str, key: str | None, lowest: float, highest: float) -> None:
        self._pattern = re.compile(pattern)
        self._key = key
        self._lowest = lowest
        self._highest = highest

    def score(self, text: str) -> float:
        """The last score in a judge's answer, its thinking left out.

        Raises:
            ValueError: when there is none, or it is out of range.
        """
        said = text.rpartition(END_OF_THINKING)[2].strip()
        found = self._by_pattern(said) if self._key is None else _by_key(said, self._key)
        if found is None:
            raise ValueError(f"the judge named no score; it ended with {said[-SHOWN_CHARACTERS:]!r}")
        if not self._lowest <= found <= self._highest:
            raise ValueError(f"the judge's score {found:g} is not from {self._lowest:g} to {self._highest:g}")
        return found

    def scaled(self, score: float) -> float:
        """The score as a number from 0 to 1."""
        return (score - self._lowest) / (self._highest - self._lowest)

    def _by_pattern(self, said: str) -> float | None:
        matches = list(self._pattern.finditer(said))
        return _number(matches[-1][1]) if matches else None


def _by_key(said: str, key: str) -> float | None:
    """The number under `key` of the last JSON object in the text that has one."""
    decoder, end = json.JSONDecoder(), len(said)
    while (start := said.rfind("{", 0, end)) >= 0:
        end = start
        try:
            value, _ = decoder.raw_decode(said, start)
        except (ValueError, RecursionError):
            continue
        if key in value:
            return _number(value[key])
    return None


def _number(value: object) -> float | None:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
