"""Expressions compared through SymPy, only where that is cheap: small texts, bounded powers, no Python evaluated."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from slime_rm_math.expression import parse
from slime_rm_math.tokens import Token, Unparsable, tokenize

DIGITS = 80
"""Working precision of the numerical comparison, in decimal digits."""

TOLERANCE_DIGITS = 60
"""Values that agree to so many digits are equal."""

NUM_POINTS = 4
"""Points at which expressions with symbols are compared; positive and negative ones, so that |x| is not x."""


def same_value(left: str, right: str) -> bool:
    """Whether two expressions are equal for all values of their symbols; False where that is unreadable or dear."""
    try:
        left_tokens, right_tokens = tokenize(left), tokenize(right)
    except Unparsable:
        return False
    return _same_tokens(tuple(left_tokens), tuple(right_tokens))


@lru_cache(maxsize=1024)
def _same_tokens(left: tuple[Token, ...], right: tuple[Token, ...]) -> bool:
    """SymPy's part, remembered because the samples of a group often give the same answer."""
    try:
        first, second = parse(left), parse(right)
    except Unparsable:
        return False
    difference = first - second
    if difference.is_Rational:
        return bool(difference == 0)
    symbols = sorted(difference.free_symbols, key=str)
    verdicts = [_agree_at(point, first, second) for point in _points(symbols)]
    decided = [verdict for verdict in verdicts if verdict is not None]
    # at least two points must decide where there are symbols; a constant has one point
    return len(decided) >= min(2, len(verdicts)) and all(decided)


def _points(symbols: list[Any]) -> list[dict[Any, Any]]:
    """Values for the symbols: fixed rationals without structure, of either sign."""
    from sympy import Rational

    if not symbols:
        return [{}]
    return [
        {symbol: Rational((-1) ** (i * j) * (37 + 11 * i + 17 * j), 29 + 2 * i) for i, symbol in enumerate(symbols, 1)}
        for j in range(NUM_POINTS)
    ]


def _agree_at(point: dict[Any, Any], first: Any, second: Any) -> bool | None:
    """Whether the two values are numerically equal; None where one of them is not a finite number."""
    import sympy

    values = [expression.evalf(DIGITS, subs=point) for expression in (first, second)]
    if not all(value.is_number and value.is_finite for value in values):
        return None
    left, right = values
    size = max(abs(left), abs(right))
    tolerance = sympy.Float(10, DIGITS) ** -TOLERANCE_DIGITS
    return bool(abs(left - right) <= tolerance * size) or bool(size <= tolerance**1.5)
