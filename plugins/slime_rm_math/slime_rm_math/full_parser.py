"""The last tier: math-verify, which reads LaTeX that nothing cheaper does, with a check on what it accepts."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

MAX_LENGTH = 300
"""Longer texts are not worth what parsing them costs."""

MAX_POWERS = 6
"""More powers than this, or a longer run of digits than the pattern below allows, may make SymPy compute for ever."""

DIGITS = 40
CLOSE_DIGITS = 15

_RISKY = re.compile(
    r"\d{25,}|!\s*!|\d{4,}\s*[)}]*!|(?:\^|\*\*)\s*[({]*\s*-?\d{5,}|"
    r"(?:\^|\*\*)[^+\-=,]{0,12}(?:\^|\*\*)[^+\-=,]{0,12}(?:\^|\*\*)|[({]{30,}"
)


def full_parser_agrees(answer: str, label: str) -> bool:
    """Whether math-verify takes the answer for the label; False where asking it could cost too much."""
    if not (_readable(answer) and _readable(label)):
        return False
    return _agree(answer, label)


def _readable(text: str) -> bool:
    powers = text.count("^") + text.count("**")
    return len(text) <= MAX_LENGTH and powers <= MAX_POWERS and not _RISKY.search(text)


@lru_cache(maxsize=1024)
def _agree(answer: str, label: str) -> bool:
    from math_verify import verify

    gold, target = _parsed(label), _parsed(answer)
    return any(
        verify(first, second, timeout_seconds=None, allow_set_relation_comp=True) and _plausible(first, second)
        for first in gold
        for second in target
    )


@lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[Any, ...]:
    """Without math-verify's alarms: the process that this runs in is killed from outside."""
    from math_verify import LatexExtractionConfig, parse

    # it warns, in every process, that its alarms are off
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    written = text if "$" in text or "\\boxed" in text else f"${text}$"
    found = parse(written, [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)
    # the last entry is the text itself, which the cheaper tiers have compared
    return tuple(value for value in found if not isinstance(value, str))


def _plausible(first: Any, second: Any) -> bool:
    """Whether two constants that math-verify calls equal are: it takes what differs by less than 10^-15 for zero."""
    from sympy import Expr

    if not isinstance(first, Expr) or not isinstance(second, Expr) or first.free_symbols or second.free_symbols:
        return True
    left, right = first.evalf(DIGITS), second.evalf(DIGITS)
    if not (left.is_number and right.is_number and left.is_finite and right.is_finite):
        return True
    size = max(abs(left), abs(right))
    return bool(abs(left - right) <= size * 10**-CLOSE_DIGITS) or bool(
        abs(left * 100 - right) <= size * 10**-CLOSE_DIGITS
    )
