"""Expressions as tokens; what is no expression is refused here, before SymPy is loaded."""

from __future__ import annotations

import re
from typing import TypeAlias

MAX_CHARACTERS = 200
"""Longer texts are compared by spelling only."""

FUNCTIONS = ("sin", "cos", "tan", "cot", "sec", "csc", "ln", "log", "exp", "arcsin", "arccos", "arctan")

Token: TypeAlias = str

_TOKEN = re.compile(r"\d+(?:\.\d+)?|\.\d+|\\[a-zA-Z]+|\\[{}]|[a-zA-Z]+|\*\*|[-+*/^_(){}\[\]|!]", re.ASCII)
_WORDS = frozenset({*FUNCTIONS, "sqrt", "pi"})


class Unparsable(ValueError):
    """The text is no expression this parser reads, or would cost too much."""


def tokenize(text: str) -> list[Token]:
    r"""Split an expression; words come as commands (`pi` as `\pi`), up to three other letters as single symbols.

    Raises:
        Unparsable: on anything else, before SymPy is loaded.
    """
    if len(text) > MAX_CHARACTERS:
        raise Unparsable("too long")
    tokens: list[Token] = []
    position = 0
    while position < len(text):
        if text[position] == " ":
            position += 1
            continue
        match = _TOKEN.match(text, position)
        if match is None:
            raise Unparsable(f"no token at {text[position : position + 10]!r}")
        tokens += _letters(match[0]) if match[0].isalpha() else [match[0]]
        position = match.end()
    return tokens


def _letters(word: str) -> list[Token]:
    if word in _WORDS:
        return [f"\\{word}"]
    if len(word) > 3:
        raise Unparsable(f"the word {word!r}")
    return list(word)
