"""What IFEval counts in a text: words, sentences, paragraphs, bullets and the like. All in linear time."""

from __future__ import annotations

import re

WORD = re.compile(r"\w+")
CAPITAL_WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")
PLACEHOLDER = re.compile(r"\[[^\[\]\n]*\]")
HIGHLIGHT = re.compile(r"\*\*([^\n*]*)\*\*|\*([^\n*]*)\*")
SENTENCE_END = re.compile(r"[.!?\u2026\u3002\uff01\uff1f]+[\"'\u201d\u2019)\]*_]*(?=\s|$)|[\u3002\uff01\uff1f](?=\S)")
ABBREVIATION = re.compile(
    r"(?:^|[\s(\"'])(?i:mr|mrs|ms|dr|prof|sr|jr|st|vs|etc|e\.g|i\.e|cf|fig|inc|ltd|dept|approx|gen|rep|sen|gov|"
    r"capt|lt|col|rev|jan|feb|aug|sept|oct|nov|a\.m|p\.m|u\.s|u\.k)$|(?:^|[\s.])[A-Z]$|(?:^|\n)\s*\d{1,2}$"
)
"""Before a point that ends no sentence: an abbreviation, an initial, the number of a list's item."""
LONGEST_ABBREVIATION = 8


def words(text: str) -> int:
    """Runs of letters, digits and underscores."""
    return len(WORD.findall(text))


def capital_words(text: str) -> int:
    """Words written all in capitals."""
    return sum(word.isupper() for word in CAPITAL_WORD.findall(text))


def letters(text: str, letter: str) -> int:
    """Occurrences of a letter, whatever its case."""
    return text.lower().count(letter.lower())


def keyword(text: str, word: str) -> int:
    """Occurrences of a keyword, whatever its case, also inside longer words."""
    return len(re.findall(re.escape(word), text, re.IGNORECASE))


def whole_word(text: str, word: str) -> int:
    """Occurrences of a keyword, whatever its case, that are no part of a longer word."""
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def sentences(text: str) -> int:
    """Sentences: stretches with a word in them, up to a full stop and its kin, or to an empty line."""
    return sum(_sentences_of(paragraph) for paragraph in re.split(r"\n[^\S\n]*\n", text))


def _sentences_of(paragraph: str) -> int:
    count, start = 0, 0
    for end in SENTENCE_END.finditer(paragraph):
        before = paragraph[max(start, end.start() - LONGEST_ABBREVIATION) : end.start()]
        if end[0] == "." and ABBREVIATION.search(before) and end.end() < len(paragraph):
            continue
        count += WORD.search(paragraph, start, end.start()) is not None
        start = end.end()
    return count + (WORD.search(paragraph, start) is not None)


def separated(text: str, separator: str) -> list[str] | None:
    """The parts between separators, an empty first or last one left out; None when an empty one is between."""
    parts = [part.strip() for part in text.split(separator)]
    if parts and not parts[0]:
        del parts[0]
    if parts and not parts[-1]:
        del parts[-1]
    return parts if all(parts) else None


def paragraphs(text: str) -> list[str]:
    """The parts between empty lines."""
    return [part.strip() for part in text.split("\n\n") if part.strip()]


def bullets(text: str) -> int:
    """Lines that begin with an asterisk (but not two) or a dash, rules such as --- left out."""
    lines = [line.strip() for line in text.splitlines()]
    stars = sum(line[:1] == "*" and len(line) > 1 and line[1] != "*" for line in lines)
    return stars + sum(line[:1] == "-" and bool(line.strip("- ")) for line in lines)


def highlights(text: str) -> int:
    """Stretches of a line between asterisks, single or double, with something in them."""
    return sum(bool((bold or light).strip()) for bold, light in HIGHLIGHT.findall(text))


def placeholders(text: str) -> int:
    """Stretches of a line in square brackets."""
    return len(PLACEHOLDER.findall(text))


def sections(text: str, splitter: str) -> int:
    """Headings: the splitter, at most a space, a number."""
    return len(re.findall(rf"{re.escape(splitter)}\s?\d+", text))
