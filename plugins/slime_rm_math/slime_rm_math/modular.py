"""Rational constants too long to write out, told apart by their remainders on division by large primes."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

from slime_rm_math.evaluate import Undefined, evaluate
from slime_rm_math.expression import Node
from slime_rm_math.tokens import TooLarge

PRIMES = (2**61 - 1, 2**89 - 1)
DIGITS = 50
"""Precision of exponents; those that count come out exact."""

_OPERATIONS: dict[str, Callable[[int, int, int], int]] = {
    "add": lambda a, b, prime: a + b,
    "sub": lambda a, b, prime: a - b,
    "mul": lambda a, b, prime: a * b,
    "div": lambda a, b, prime: a * pow(b, -1, prime),
}


def certainly_differ(left: Node, right: Node) -> bool:
    """Whether both are rational and cannot be equal; False where that is not known."""
    for prime in PRIMES:
        first, second = remainder(left, prime), remainder(right, prime)
        if first is not None and second is not None and first != second:
            return True
    return False


@lru_cache(maxsize=1024)
def remainder(node: Node, prime: int) -> int | None:
    """A rational constant modulo a prime; None for what is none, or divides by a multiple of the prime."""
    try:
        return _remainder(node, prime) % prime
    except (_Unknown, Undefined, TooLarge):
        return None


class _Unknown(Exception):
    """Not to be told this way."""


def _remainder(node: Node, prime: int) -> int:
    if node.kind == "number":
        return _quotient(node.value, prime)
    if node.name == "neg":
        return -_remainder(node.parts[0], prime)
    if node.name == "pow":
        base, exponent = _remainder(node.parts[0], prime), evaluate(node.parts[1], {}, DIGITS)
        if not isinstance(exponent, Fraction) or exponent.denominator != 1 or base % prime == 0:
            raise _Unknown
        return pow(base, exponent.numerator, prime)
    if node.name in _OPERATIONS:
        first, second = (_remainder(part, prime) for part in node.parts)
        if node.name == "div" and second % prime == 0:
            raise _Unknown
        return _OPERATIONS[node.name](first, second, prime) % prime
    value = evaluate(node, {}, DIGITS)
    if not isinstance(value, Fraction):
        raise _Unknown
    return _quotient(value, prime)


def _quotient(value: Fraction, prime: int) -> int:
    if value.denominator % prime == 0:
        raise _Unknown
    return value.numerator * pow(value.denominator, -1, prime) % prime
