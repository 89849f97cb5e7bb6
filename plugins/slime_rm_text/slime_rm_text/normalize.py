"""The normalisation of SQuAD's evaluation script (Rajpurkar et al. 2016), but numbers keep their sign and point."""

from __future__ import annotations

import re
import string

MINUS = str.maketrans({"\u2212": "-", "\u2010": "-", "\u2011": "-"})
IN_NUMBER = r"(?<=\d)[./:-](?=\d)|(?<![\w.])-(?=\.?\d)|(?<![\w.])\.(?=\d)"
"""Punctuation that tells numbers apart: 2.5, 1/2, 10:30, 3-5; -5; .5."""
PUNCTUATION = re.compile(f"({IN_NUMBER})|[{re.escape(string.punctuation)}]")
ARTICLE = re.compile(r"\b(?:a|an|the)\b")


def normalized(text: str) -> str:
    """The text in lower case, without punctuation and articles, its words one space apart."""
    kept = PUNCTUATION.sub(lambda match: match[1] or "", text.lower().translate(MINUS))
    return " ".join(ARTICLE.sub(" ", kept).split())


def comparable(text: str, other: str) -> tuple[str, str]:
    """Both texts normalised, or where that leaves nothing of the second only without case and outer space.

    An answer such as "A" or "The" consists of what normalisation takes away: everything empty would equal it.
    """
    ours, theirs = normalized(text), normalized(other)
    return (ours, theirs) if theirs else (text.strip().casefold(), other.strip().casefold())
