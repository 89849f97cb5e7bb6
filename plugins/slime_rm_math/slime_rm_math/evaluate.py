"""Trees evaluated at a point: as exact fractions while that is cheap, else to a hundred digits; never at any price."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from slime_rm_math.expression import Node
from slime_rm_math.tokens import TooLarge

MAX_BITS = 1 << 16
"""Exact fractions grow no longer."""

MAX_LOG2_EXPONENT = 40
"""Numbers up to 2^(2^40) either way are computed; exponents beyond that cost memory."""

MAX_TRIG_BITS = 256
"""An angle's size in bits; every one of them costs digits of pi."""

MAX_FACTORIAL = 10**12


class Undefined(ValueError):
    """The expression has no finite value at the point."""


@lru_cache(maxsize=4)
def context(digits: int) -> Any:
    """An mpmath context of its own, so that no other code's precision is touched."""
    import mpmath

    made = mpmath.MPContext()
    made.dps = digits
    return made


def evaluate(node: Node, point: Mapping[str, Fraction], digits: int, real: bool = False) -> Any:
    """A Fraction, or an mpmath number of so many digits.

    Raises:
        Undefined: where there is no finite value, or with `real` where a part of it is not real.
        TooLarge: where the value, or a part, would cost too much.
    """
    return _Evaluator(point, context(digits), real).value(node)


class _Evaluator:
    """One tree at one point; a method an operation that needs care."""

    def __init__(self, point: Mapping[str, Fraction], mp: Any, real: bool):
        self.point = point
        self.mp = mp
        self.real = real

    def value(self, node: Node) -> Any:
        if node.kind == "number":
            return node.value
        if node.kind == "symbol":
            return self.point[node.name]
        if node.kind == "constant":
            return self.constant(node.name)
        parts = [self.value(part) for part in node.parts]
        if node.name in _EXACT and all(isinstance(part, Fraction) for part in parts):
            exact = self.exact(node.name, parts)
            if exact is not None:
                return exact
        try:
            return self.finite(self.inexact(node.name, [self.inexactly(part) for part in parts], parts))
        except (ZeroDivisionError, ValueError, OverflowError) as error:
            if isinstance(error, TooLarge):
                raise
            raise Undefined(f"{node.name} is not defined here") from None

    def constant(self, name: str) -> Any:
        if name == "infinity":
            return self.mp.inf
        return {"e": self.mp.e, "pi": self.mp.pi, "i": self.mp.j}[name] * 1

    def inexactly(self, value: Any) -> Any:
        return self.mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value

    def finite(self, value: Any) -> Any:
        if self.mp.isnan(value):
            raise Undefined("no number")
        if self.real and self.mp.im(value):
            raise Undefined("not real")
        return value

    def exact(self, name: str, parts: list[Fraction]) -> Fraction | None:
        """None where the exact value is too long, or none."""
        if name == "pow":
            return _exact_power(*parts)
        if name == "factorial":
            return _exact_factorial(parts[0])
        if name == "double_factorial":
            return _exact_double_factorial(parts[0])
        if sum(_bits(part) for part in parts) > MAX_BITS:
            return None
        if name == "div" and parts[1] == 0:
            raise Undefined("division by zero")
        result: Fraction | None = _EXACT[name](*parts)
        return result

    def inexact(self, name: str, values: list[Any], parts: list[Any]) -> Any:
        mp, first = self.mp, values[0]
        if name in ("add", "sub", "mul", "div", "neg", "abs"):
            return _EXACT[name](*values)
        if name == "pow":
            return self.power(values[0], values[1], parts[1])
        if name == "root":
            degree = parts[1]
            if not isinstance(degree, Fraction) or degree == 0:
                raise Undefined("a root of no rational degree")
            return self.power(first, 1 / self.inexactly(degree), 1 / degree)
        if name == "log":
            return mp.log(first) / self.nonzero(mp.log(values[1]))
        if name in ("floor", "ceil"):
            return getattr(mp, name)(first)
        if name == "factorial":
            return self.factorial(first)
        if name == "double_factorial":
            raise Undefined("a double factorial of no whole number")
        if name == "binomial":
            if max(abs(value) for value in values) > 10**6:
                raise TooLarge("a large binomial")
            return mp.binomial(*values)
        if name == "degrees":
            return first * mp.pi / 180
        if name == "exp":
            return self.power(mp.e * 1, first, None)
        self.bound(first, MAX_TRIG_BITS)
        function = getattr(mp, {"ln": "log"}.get(name, name.replace("arc", "a")))
        return function(first)

    def power(self, base: Any, exponent: Any, exact_exponent: Any) -> Any:
        """Roots of odd degree of negative numbers are real, as at school; the principal ones would be complex."""
        mp = self.mp
        if base == 0:
            if mp.re(exponent) <= 0:
                raise Undefined("zero has no such power")
            return mp.mpf(0)
        if mp.isinf(base) or mp.isinf(exponent):
            raise Undefined("a power of infinity")
        size = abs(exponent) * (abs(mp.mag(base)) + 4)
        if size > 0 and mp.mag(size) > MAX_LOG2_EXPONENT:
            raise TooLarge("a large power")
        if isinstance(exact_exponent, Fraction):
            numerator, denominator = exact_exponent.numerator, exact_exponent.denominator
            if denominator == 1:
                return base**numerator
            if exact_exponent == Fraction(1, 2):
                return mp.sqrt(base)
            if denominator % 2 and not mp.im(base) and mp.re(base) < 0:
                return (-1) ** (numerator % 2) * mp.power(-mp.re(base), exponent)
        return mp.power(base, exponent)

    def factorial(self, value: Any) -> Any:
        if abs(value) > MAX_FACTORIAL:
            raise TooLarge("a large factorial")
        return self.mp.gamma(value + 1)

    def nonzero(self, value: Any) -> Any:
        if value == 0:
            raise Undefined("division by zero")
        return value

    def bound(self, value: Any, bits: int) -> None:
        if value and self.mp.mag(value) > bits:
            raise TooLarge("a large argument")


_EXACT: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "abs": abs,
    "pow": pow,
    "factorial": abs,
    "double_factorial": abs,
    "floor": lambda a: Fraction(a.numerator // a.denominator),
    "ceil": lambda a: Fraction(-(-a.numerator // a.denominator)),
    "binomial": lambda n, k: _exact_binomial(n, k),
}
"""What stays exact on fractions; powers, factorials and `binomial` only where they are rational and short."""


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1 or _bits(base) * abs(exponent.numerator) > MAX_BITS:
        return None
    if base == 0 and exponent <= 0:
        raise Undefined("zero has no such power")
    return base**exponent.numerator


def _exact_factorial(value: Fraction) -> Fraction | None:
    import math

    if value.denominator != 1 or value > 5000:
        return None
    if value < 0:
        raise Undefined("a factorial of a negative number")
    return Fraction(math.factorial(value.numerator))


def _exact_double_factorial(value: Fraction) -> Fraction:
    import math

    if value.denominator != 1 or value < 0:
        raise Undefined("a double factorial of no whole number")
    if value > 5000:
        raise TooLarge("a large double factorial")
    return Fraction(math.prod(range(value.numerator, 0, -2)))


def _exact_binomial(top: Fraction, bottom: Fraction) -> Fraction | None:
    import math

    if top.denominator != 1 or bottom.denominator != 1 or top > 5000 or top < 0 or bottom < 0:
        return None
    return Fraction(math.comb(top.numerator, bottom.numerator))
