"""A small parser from LaTeX or plain notation to SymPy, with a bound on the size of everything it builds.

sum      = product (("+" | "-") product)*
product  = signed (("*" | "/" | nothing) signed)*
signed   = ("+" | "-") signed | power
power    = atom ("^" signed)?
atom     = number | symbol | constant | function argument | fraction | root | bracketed sum
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from slime_rm_math.tokens import FUNCTIONS, Token, Unparsable

MAX_DEPTH = 24
MAX_COST = 4096
"""Largest size, in bits, that exact evaluation at a small rational point may reach."""

MAX_EXPONENT_COST = 24
"""The same bound for an exponent: what is in it grows the value exponentially."""

SYMBOL_COST = 8
"""Bits of a symbol's value."""

SYMBOLIC_POWER = 64
"""What a power with a symbol in its exponent is taken for."""

_GREEK = frozenset(["alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "mu", "phi", "psi", "omega"])
_BRACKETS = {"(": ")", "{": "}", "[": "]", "|": "|"}
_STARTS = frozenset({"(", "{", "[", "\\frac", "\\sqrt"})


class Sized(NamedTuple):
    """An expression and a bound on the bits of its value."""

    value: Any
    cost: int


def parse(tokens: Sequence[Token]) -> Any:
    """The SymPy expression of the tokens.

    Raises:
        Unparsable: when they are no expression, or its size passes the bounds.
    """
    parser = _Parser(tokens)
    result = parser.sum()
    if parser.position < len(tokens):
        raise Unparsable(f"unexpected {tokens[parser.position]!r}")
    return result.value


class _Parser:
    """Recursive descent over a token list; a method a rule."""

    def __init__(self, tokens: Sequence[Token]):
        import sympy

        self.sympy: Any = sympy
        self.tokens = tokens
        self.position = 0
        self.depth = 0

    def peek(self) -> Token:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self, *expected: Token) -> Token:
        token = self.peek()
        if not token or (expected and token not in expected):
            raise Unparsable(f"{' or '.join(expected)} is missing")
        self.position += 1
        return token

    def skip(self, *wanted: Token) -> Token:
        return self.take() if self.peek() in wanted and self.peek() else ""

    def sum(self) -> Sized:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unparsable("nested too deeply")
        total = self.product()
        while sign := self.skip("+", "-"):
            term = self.product()
            total = _sized(total.value + term.value if sign == "+" else total.value - term.value, total, term)
        self.depth -= 1
        return total

    def product(self) -> Sized:
        result = self.signed()
        while True:
            if self.skip("/"):
                result = self.divide(result, self.signed())
            elif self.skip("*") or self.starts_atom():
                factor = self.signed()
                result = _sized(result.value * factor.value, result, factor)
            else:
                return result

    def starts_atom(self) -> bool:
        """Whether a factor follows without a sign: `2x`, `3\\pi`, `x(x+1)`; never number after number."""
        token = self.peek()
        if token[:1].isdigit() or token.startswith("."):
            return self.tokens[self.position - 1] in (")", "}", "]")
        return token.isalpha() or token in _STARTS or (token.startswith("\\") and token[1:].isalpha())

    def signed(self) -> Sized:
        negative = False
        while sign := self.skip("+", "-"):
            negative ^= sign == "-"
        result = self.power()
        return Sized(-result.value, result.cost) if negative else result

    def power(self) -> Sized:
        base = self.atom()
        if not self.skip("^", "**"):
            return base
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unparsable("nested too deeply")
        exponent = self.signed()
        self.depth -= 1
        return self.raised(base, exponent)

    def raised(self, base: Sized, exponent: Sized) -> Sized:
        """A power whose size is bounded before SymPy, which multiplies integer powers out at once, sees it."""
        if exponent.cost > MAX_EXPONENT_COST:
            raise Unparsable("too large an exponent")
        size = abs(exponent.value)
        factor = int(size) + 1 if size.is_Rational else SYMBOLIC_POWER
        cost = base.cost * factor
        if cost > MAX_COST:
            raise Unparsable("too large a power")
        if base.value == 0 and not exponent.value.is_positive:
            raise Unparsable("zero has no such power")
        return Sized(base.value**exponent.value, cost)

    def divide(self, top: Sized, bottom: Sized) -> Sized:
        if bottom.value == 0:
            raise Unparsable("division by zero")
        return _sized(top.value / bottom.value, top, bottom)

    def atom(self) -> Sized:
        token = self.take()
        if token[0].isdigit() or token[0] == ".":
            return Sized(self.sympy.Rational(token), 4 * len(token))
        if token in _BRACKETS:
            inner = self.sum()
            self.take(_BRACKETS[token])
            return Sized(abs(inner.value), inner.cost) if token == "|" else inner
        if token.isalpha():
            return self.symbol(token)
        return self.command(token.removeprefix("\\"))

    def symbol(self, name: str) -> Sized:
        if name in ("e", "i"):
            return Sized({"e": self.sympy.E, "i": self.sympy.I}[name], SYMBOL_COST)
        if self.skip("_"):
            closing = "}" if self.skip("{") else ""
            name = f"{name}_{self.take()}"
            if closing:
                self.take(closing)
        return Sized(self.sympy.Symbol(name), SYMBOL_COST)

    def command(self, name: str) -> Sized:
        if name == "pi":
            return Sized(self.sympy.pi, SYMBOL_COST)
        if name in _GREEK:
            return self.symbol(name)
        if name == "frac":
            return self.divide(self.braced(), self.braced())
        if name == "sqrt":
            return self.root()
        if name in FUNCTIONS:
            return self.function(name)
        raise Unparsable(f"the command {name!r}")

    def braced(self) -> Sized:
        self.take("{")
        inner = self.sum()
        self.take("}")
        return inner

    def root(self) -> Sized:
        degree = Sized(self.sympy.Integer(2), SYMBOL_COST)
        if self.skip("["):
            degree = self.sum()
            self.take("]")
        radicand = self.atom()
        if not (degree.value.is_Integer and 2 <= degree.value <= 16):
            raise Unparsable("a root of such degree")
        return Sized(radicand.value ** (1 / degree.value), radicand.cost)

    def function(self, name: str) -> Sized:
        exponent = base = None
        if self.skip("^"):
            exponent = self.atom()
            if exponent.value == -1:
                raise Unparsable("an inverse function by exponent")
        if name == "log" and self.skip("_"):
            base = self.atom()
        argument = self.argument()
        if name == "exp":
            result = self.raised(self.symbol("e"), argument)
        else:
            result = Sized(self.apply(name, argument, base), argument.cost + SYMBOL_COST)
        return self.raised(result, exponent) if exponent else result

    def argument(self) -> Sized:
        """A bracketed argument, or the run of numbers, symbols and fractions behind the function's name."""
        result = self.atom()
        if self.tokens[self.position - 1] not in _BRACKETS.values():
            while self.peek().isalpha() or self.peek() == "\\pi":
                factor = self.atom()
                result = _sized(result.value * factor.value, result, factor)
        return result

    def apply(self, name: str, argument: Sized, base: Sized | None) -> Any:
        if name in ("ln", "log") and (argument.value == 0 or (base and base.value in (0, 1))):
            raise Unparsable("a logarithm that is not defined")
        if name == "log":
            # without a base it is the common one in school notation
            return self.sympy.log(argument.value, base.value if base else 10)
        function = getattr(self.sympy, {"ln": "log"}.get(name, name.replace("arc", "a")))
        return function(argument.value)


def _sized(value: Any, *parts: Sized) -> Sized:
    """A sum or product, whose exact value is at most as long as its parts together."""
    cost = sum(part.cost for part in parts)
    if cost > MAX_COST:
        raise Unparsable("too large")
    return Sized(value, cost)
