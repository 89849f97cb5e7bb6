"""Expressions as tokens; what is no expression is refused here, cheaply."""

from __future__ import annotations

import re
from typing import TypeAlias

MAX_CHARACTERS = 1200
"""Longer texts are compared by spelling only."""

_TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc")
_HYPERBOLIC = ("sinh", "cosh", "tanh", "coth", "sech", "csch")
INVERSES = {name: f"arc{name}" for name in _TRIGONOMETRIC}
FUNCTIONS = frozenset({*_TRIGONOMETRIC, *_HYPERBOLIC, *INVERSES.values(), "ln", "log", "lg", "exp"})
GREEK = frozenset(
    {
        *("alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "kappa"),
        *("lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "phi", "varphi", "chi", "psi", "omega", "ell"),
        *("Gamma", "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Phi", "Psi", "Omega"),
    }
)

Token: TypeAlias = str

_TOKEN = re.compile(
    r"\d+(?:\.\d+)?|\.\d+|\\[a-zA-Z]+|\\[{}|]|[a-zA-Z]+'*|\*\*|!+|[-+*/^_(){}\[\]|]",
    re.ASCII,
)
_WORDS = {name: f"\\{name}" for name in (*FUNCTIONS, "sqrt", "pi", "cbrt", "cis")}
_WORDS |= {"asin": r"\arcsin", "acos": r"\arccos", "atan": r"\arctan", "abs": r"\abs"}
_WORDS |= {"tg": r"\tan", "ctg": r"\cot", "inf": r"\infty", "infty": r"\infty"}
_LONGEST_NAME = 3
"""Longer runs of letters are words, not products of symbols."""


class Unparsable(ValueError):
    """The text is no expression this parser reads."""


class TooLarge(Unparsable):
    """The text is an expression whose value would cost too much; nothing else should try it."""


def tokenize(text: str) -> list[Token]:
    r"""Split an expression; words come as commands (`pi` as `\pi`), up to three other letters as single symbols.

    Raises:
        Unparsable: on anything else.
    """
    if len(text) > MAX_CHARACTERS:
        raise TooLarge("too long")
    tokens: list[Token] = []
    position = 0
    while position < len(text):
        if text[position] == " ":
            position += 1
            continue
        match = _TOKEN.match(text, position)
        if match is None:
            raise Unparsable(f"no token at {text[position : position + 10]!r}")
        token = match[0]
        tokens += _letters(token) if token[0].isalpha() else [token]
        position = match.end()
    return tokens


def _letters(word: str) -> list[Token]:
    if word in _WORDS:
        return [_WORDS[word]]
    letters = word.rstrip("'")
    for name in sorted(_WORDS, key=len, reverse=True):
        # `xsin` and `sinx`, which LaTeX commands without their backslash leave behind
        if len(name) > 2 and name in letters and len(letters) - len(name) <= 2:
            before, _, after = letters.partition(name)
            return [*before, _WORDS[name], *after]
    if len(letters) > _LONGEST_NAME:
        raise Unparsable(f"the word {word!r}")
    return [*letters[:-1], letters[-1] + word[len(letters) :]]
