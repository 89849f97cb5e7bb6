"""Whether two expressions are the same function: compared in value to many digits, at points without structure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from enum import Enum
from fractions import Fraction
from functools import lru_cache
from typing import Any

from slime_rm_math.evaluate import Undefined, context, evaluate
from slime_rm_math.expression import Node, operation
from slime_rm_math.modular import certainly_differ

DIGITS = 100
"""Working precision, in decimal digits."""

LOST_DIGITS = 30
"""Values that agree to all but the last so many digits are equal."""

PROOF_DIGITS = 1000
"""Constants that agree are computed again with so many digits: 10^200 is not the root of 10^400 + 1."""

TINY_DIGITS = 60
"""A value below 10^-TINY_DIGITS may be the rounding of a zero; it is computed again with more digits."""

RANGES = ((0.1, 0.9), (1.1, 3), (3, 12), (20, 90), (-0.9, 2), (-7, -1.1), (-12, 12))
"""Where the points lie: square roots, logarithms and inverse functions are defined in some only; |x| is not x."""

MIN_POINTS = 2
SIGNIFICANT_DIGITS = 6
"""A decimal with at least so many significant digits stands for the number that it is rounded from."""

Point = Mapping[str, Fraction]


class Verdict(Enum):
    """What comparing by value gives."""

    SAME = "same"
    DIFFERENT = "different"
    UNKNOWN = "unknown"


def compare_values(left: Node, right: Node) -> Verdict:
    """Whether two expressions are equal for all values of their symbols, over the reals unless `i` is in them.

    Raises:
        TooLarge: where that cannot be told at a bounded price.
    """
    if left == right:
        return Verdict.SAME
    names = tuple(sorted(symbols(left) | symbols(right)))
    return _compare(left, right, names, not has_imaginary(left) and not has_imaginary(right))


def proportional(left: Node, right: Node) -> Fraction | None:
    """The constant sign of left / right, as 1 or -1, where the quotient is a constant; None elsewhere.

    Raises:
        TooLarge: as compare_values.
    """
    names = tuple(sorted(symbols(left) | symbols(right)))
    quotient = operation("div", left, right)
    values = [value for point in points(names) if (value := value_at(quotient, point)) is not None]
    if len(values) < MIN_POINTS or any(not _real(value) or not value for value in values):
        return None
    if all(_close(value, values[0]) for value in values):
        return Fraction(1 if context(DIGITS).re(_number(values[0])) > 0 else -1)
    return None


def rounds_to(exact: Node, decimal: Fraction, places: int) -> bool:
    """Whether a constant, no terminating decimal itself, gives this decimal of so many places, rounded or cut off."""
    if symbols(exact):
        return False
    value = value_at(exact, {})
    if value is None or not _real(value) or _significant(decimal, places) < SIGNIFICANT_DIGITS:
        return False
    error = abs(_number(value) - _number(decimal))
    return bool(0 < error < context(DIGITS).mpf(10) ** -places)


@lru_cache(maxsize=4096)
def symbols(node: Node) -> frozenset[str]:
    """Names of the free symbols."""
    return frozenset(part.name for part in node.walk() if part.kind == "symbol")


def has_imaginary(node: Node) -> bool:
    """Whether `i` occurs."""
    return any(part.kind == "constant" and part.name == "i" for part in node.walk())


def points(names: tuple[str, ...]) -> Iterator[Point]:
    """Rational values for the symbols, the same ones every time; one empty point where there are no symbols."""
    if not names:
        yield {}
        return
    for number, (low, high) in enumerate(RANGES):
        chance = random.Random(number)
        yield {name: Fraction(int(chance.uniform(low, high) * 9973), 9973) for name in names}
    yield {name: Fraction(3 + 2 * position) for position, name in enumerate(names)}
    # opposite signs: the root of x^2 y^2 is xy where both have the same
    yield {name: Fraction((-1) ** position * (7 + 4 * position), 3) for position, name in enumerate(names)}
    yield {name: Fraction((-1) ** (position + 1) * (5 + 6 * position), 7) for position, name in enumerate(names)}


@lru_cache(maxsize=1024)
def _compare(left: Node, right: Node, names: tuple[str, ...], over_reals: bool) -> Verdict:
    if not names:
        return _compare_constants(left, right)
    # where every part is real first: sqrt(ab) is sqrt(a) sqrt(b) wherever that is defined
    for real in (True, False) if over_reals else (False,):
        num_same = 0
        for point in points(names):
            first, second = value_at(left, point, real=real), value_at(right, point, real=real)
            if first is None or second is None:
                continue
            if not _close(first, second):
                return Verdict.DIFFERENT
            num_same += 1
        if num_same >= MIN_POINTS:
            return Verdict.SAME
    return Verdict.UNKNOWN


def _compare_constants(left: Node, right: Node) -> Verdict:
    for digits in (DIGITS, PROOF_DIGITS):
        first, second = value_at(left, {}, digits), value_at(right, {}, digits)
        if first is None or second is None:
            return Verdict.UNKNOWN
        if not _close(first, second, digits):
            return Verdict.DIFFERENT
        if isinstance(first, Fraction) and isinstance(second, Fraction):
            return Verdict.SAME
    return Verdict.DIFFERENT if certainly_differ(left, right) else Verdict.SAME


def value_at(node: Node, point: Point, digits: int = DIGITS, real: bool = False) -> Any | None:
    """The value, a rounded zero made exact; None where there is none, or with `real` where a part is not real."""
    try:
        value = evaluate(node, point, digits, real)
        if isinstance(value, Fraction) or not value:
            return value
        tiny = context(digits).mpf(10) ** -TINY_DIGITS
        if abs(value) < tiny:
            again = evaluate(node, point, 3 * digits)
            if abs(again) < abs(value) * tiny:
                return Fraction(0)
        return value
    except Undefined:
        return None


def _number(value: Any, digits: int = DIGITS) -> Any:
    return context(digits).mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _real(value: Any) -> bool:
    """Whether the value is real, but for rounding."""
    if isinstance(value, Fraction):
        return True
    mp = context(DIGITS)
    return bool(abs(mp.im(value)) <= abs(value) * mp.mpf(10) ** (LOST_DIGITS - DIGITS))


def _close(left: Any, right: Any, digits: int = DIGITS) -> bool:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    mp = context(digits)
    first, second = _number(left, digits), _number(right, digits)
    if mp.isinf(first) or mp.isinf(second):
        return bool(first == second)
    return bool(abs(first - second) <= max(abs(first), abs(second)) * mp.mpf(10) ** (LOST_DIGITS - digits))


def _significant(decimal: Fraction, places: int) -> int:
    """Significant digits of a decimal of so many places."""
    return len(str(abs(int(decimal * 10**places))))
