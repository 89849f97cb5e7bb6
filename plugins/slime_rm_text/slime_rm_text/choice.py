"""Which option of a multiple-choice question a response settles on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

from slime_rm_text.answer import last_box
from slime_rm_text.normalize import normalized

# The quantifiers are possessive (`*+`): nothing is tried twice, so that no response takes more than linear time.
OPEN = r"[\s:*_`'\"$(\[{<]*+(?:\\(?:boxed|fbox|text|textbf|mathrm|mathbf|bf)\s*+\{[\s*_`'\"$(\[{]*+)*+"
"""What may stand between a word and the letter: space, emphasis, brackets, LaTeX."""
LINK = (
    r"(?i:[*_\s]*+(?:is|are|was|be|would|should|must|will|to|:|=|->|=>|→|therefore|thus|clearly|definitely|indeed|likely|"
    r"most|probably|still|correct|option|choice|letter|answer|the)(?![\w'\u2019]))"
)
CONCLUSION = (
    r"\b(?i:therefore|thus|hence|so|conclude|conclusion|choose|chose|choosing|select|selected|selecting|pick|picked|"
    r"picking|go with|going with|goes with|opt for)\b"
)
VERDICT = r"(?:(?:the|most|clearly|indeed|therefore|thus)\s+)*+(?:correct|right|best|true|answer|accurate|valid)\b"
ALONE = r"(?![\w'\u2019])"
"""Behind a letter that is no part of a word."""
NO_WORD = r"(?:(?<![AI])|(?<=[AI])(?!\s+(?!(?:because|since|as|due|given|which|by|for|based|so|but|is|here)\b)[a-z]))"
"""Behind A and I, which are words too: no further word, but for those that follow a letter."""
NOT_DENIED = (
    r"(?![)*_]*\s+(?i:(?:is|are|was|seems|would be)\s+(?:not|in|wrong|false|impossible|out|ruled|eliminated)|"
    r"isn.t|cannot|can.t|won.t|does))"
)
DENIAL = re.compile(
    r"(?:\bnot|n.t|\bthan|\bunlike|\bexclud\w+|\beliminat\w+|\brul\w+ out)(?: be)?(?: (?:option|choice|answer))?$"
)
"""Before a letter that is not chosen."""
LIST_ITEM = re.compile(r"^[>*_ \t-]*+\(?([A-Z])[).:*]", re.MULTILINE)


@lru_cache(maxsize=64)
def _patterns(letters: str) -> tuple[list[re.Pattern[str]], re.Pattern[str], re.Pattern[str]]:
    """Statements of an answer, a line that is only a letter, and any letter on its own."""
    upper = f"[{letters}]"
    one = rf"(?!\s*(?:,|and\b|or\b|&|/)\s*(?:option\s+)?\(?{upper}{ALONE})"
    end = rf"{ALONE}{NO_WORD}{NOT_DENIED}{one}"
    # a small letter counts where nothing but its decoration and the end of the line follow, or in brackets
    either_case = rf"({upper}|[{letters.lower()}](?=[)\]}}*_.\"'`$]*+[^\S\n]*+(?:$|\n)|[)\]}}*]))"
    statements = [
        rf"\b(?i:answer)\b{LINK}{{0,8}}+{OPEN}{either_case}{end}",
        rf"\b(?i:option|choice|letter)\b(?:{LINK}{{1,8}}+|[*_]*+:){OPEN}{either_case}{end}",
        rf"\b(?i:(?:correct|right|best|final)\s+(?:option|choice|letter))\b{OPEN}{either_case}{end}",
        rf"(?<![\w'\u2019.])({upper})[)*_\"'`]*+\s+(?i:(?:is|as|must be|seems|has to be)\s+{VERDICT})",
        rf"{CONCLUSION},?{LINK}{{0,8}}+,?{OPEN}({upper}){end}",
    ]
    only = (
        r"^[\s>#*_`'\"$(\[{-]*+(?:\\(?:text|textbf|mathrm|mathbf)\{)?+"
        rf"([{letters}{letters.lower()}])[)\]}}.:,*_`'\"$\s]*+$"
    )
    alone = rf"(?<![\w'\u2019\\.+=^/-])({upper}){ALONE}{NO_WORD}{NOT_DENIED}(?!\s*[=+^/*<>-]\s*[\w\\])"
    return [re.compile(pattern) for pattern in statements], re.compile(only), re.compile(alone)


def chosen_letter(text: str, letters: str, choices: Mapping[str, str]) -> str | None:
    """The letter that a response chooses; None when it chooses none.

    The last statement counts: a box, "the answer is (B)", "B is correct", "therefore B", a first or last line that is
    only a letter or begins with one. Without any: the option whose text the response ends in, then the last letter that
    stands alone and is not denied.
    """
    statements = max(_statements(text, letters), default=None)
    if statements is not None:
        return statements[1]
    return _by_text(text, choices) or _last_alone(text, letters)


def letter_of(text: str, letters: str) -> str | None:
    r"""The letter that a short text is, with or without decoration: B, (b), **B.**, \text{B}, "B) seven"; else None."""
    _, only, _ = _patterns(letters)
    if match := only.match(text.strip()):
        return match[1].upper()
    item = LIST_ITEM.match(text)
    return item[1] if item and item[1] in letters else None


def _statements(text: str, letters: str) -> Iterator[tuple[int, str]]:
    """Position and letter of everything that states an answer."""
    box = last_box(text)
    if box is not None and (letter := letter_of(_plain(box[0]), letters)):
        yield box[1], letter
    statements, _, _ = _patterns(letters)
    for pattern in statements:
        for match in pattern.finditer(text):
            yield match.start(1), match[1].upper()
    yield from _line_statements(text, letters)


def _line_statements(text: str, letters: str) -> Iterator[tuple[int, str]]:
    """A first or last line that is only a letter, or that begins with one as an item and is not one of a list."""
    _, only, _ = _patterns(letters)
    lines = [line for line in re.finditer(r"[^\n]+", text) if line[0].strip()]
    for line, neighbours in ((lines[0], lines[1:2]), (lines[-1], lines[:-1][-1:])) if lines else ():
        item = LIST_ITEM.match(line[0])
        if match := only.match(line[0]):
            yield line.start() + match.start(1), match[1].upper()
        elif item and item[1] in letters and not any(LIST_ITEM.match(neighbour[0]) for neighbour in neighbours):
            yield line.start() + item.start(1), item[1]


def _by_text(text: str, choices: Mapping[str, str]) -> str | None:
    """The one option whose whole text is the box, the last line, or that line's end behind a colon or "is"."""
    line = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    box = last_box(text)
    ends = [line, line.rpartition(":")[2], re.split(r"\bis\b", line)[-1], *([_plain(box[0])] if box else [])]
    wanted = {normalized(end) for end in ends} - {""}
    found = [letter for letter, choice in choices.items() if normalized(choice) in wanted]
    return found[0] if len(found) == 1 else None


def _last_alone(text: str, letters: str) -> str | None:
    """The last letter that stands alone and is not denied."""
    _, _, alone = _patterns(letters)
    found, text = None, LIST_ITEM.sub("", text)
    for match in alone.finditer(text):
        before = text[max(0, match.start() - 40) : match.start()].rstrip(" *_(\"'`").lower()
        if not DENIAL.search(before):
            found = match[1]
    return found


def _plain(text: str) -> str:
    r"""A box's content without \text{...} and the like around it."""
    return re.sub(r"\\(?:text|textbf|mathrm|mathbf|bf)\s*\{([^{}]*)\}", r"\1", text).strip().strip("$").strip()
