"""The answer inside a sentence."""

from __future__ import annotations

import re

MAX_TAIL = 2000
"""Characters at the end of a text that are searched."""

MIN_WORDS = 3
MAX_STATED_WORDS = 2
"""Behind `the answer is`, so few words are the answer as they stand."""

_ANCHOR = re.compile(
    r"(?:final\s+answer\s*(?:is|are|:)|answer\s*(?:is|are|:)|answer\s*:?\s*(?=[\\$]))[\s:*}]*", re.IGNORECASE
)
_MATH = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|(?<![\\\d])\$((?:\\\$|[^$\n])+?)(?<!\\)\$|\\\(([^\n]+?)\\\)", re.DOTALL
)
_NUMBER = r"-?(?:\d[\d,]*\d|\d)(?:\.\d+)?"
_VALUE = rf"(?>[$\u20ac\u00a3]?\(?{_NUMBER}(?:\s*/\s*\d+)?\)?(?:\s*(?:%|percent))?|\\frac\{{-?\d+\}}\{{\d+\}})"
_STATED = re.compile(
    rf"(?:\b(?:is|are|equals|by)\b|'s\b|=|:)\s*(?:\*\*)?\s*({_VALUE})(?!\s*[-*/+(=^]|\.?\d|\w*[\\_^(])", re.IGNORECASE
)
_NUMBERS = re.compile(rf"(?<![\w.]){_NUMBER}(?![\w.]\w)")
_SENTENCE = re.compile(r"(?<![\d])\.(?:\s|$)|\n|\s*I hope|<\|")
_HEADING = re.compile(r"\s*[^\W\d_]{3,}\s*:\s")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")


def answer_in_prose(text: str) -> str | None:
    """What a sentence states as its answer: after `answer is`, its last formula, or a number behind `is` or `=`.

    None where there is no sentence, or nothing stated.
    """
    tail = text[-MAX_TAIL:]
    if len(_WORD.findall(tail)) < MIN_WORDS and not _ANCHOR.search(tail) and not _HEADING.match(tail):
        return None
    anchors = list(_ANCHOR.finditer(tail))
    if anchors:
        tail = tail[anchors[-1].end() :]
        if formula := _MATH.match(tail):
            return _content(formula)
        stated = _SENTENCE.split(tail, maxsplit=1)[0].strip(" *.\"'")
        if stated and len(_WORD.findall(stated)) <= MAX_STATED_WORDS:
            return stated
    found = [(formula.end(), _content(formula)) for formula in _MATH.finditer(tail)]
    found += [(number.end(1), number[1].strip()) for number in _STATED.finditer(tail)]
    if found:
        return max(found)[1]
    numbers = _NUMBERS.findall(tail) if anchors else []
    return numbers[-1] if numbers else None


def _content(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip()
