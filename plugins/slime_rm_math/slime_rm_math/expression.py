r"""A small parser from LaTeX or plain notation to a tree; nothing is evaluated here.

sum      = product (("+" | "-") product)*
product  = signed (("*" | "/" | nothing) signed)*
signed   = ("+" | "-") signed | power
power    = postfix ("^" signed)?
postfix  = atom ("!" | "\%" | "^\circ")*
atom     = number | symbol | constant | function argument | fraction | root | binomial | bracketed sum
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from slime_rm_math.tokens import FUNCTIONS, GREEK, INVERSES, Token, TooLarge, Unparsable, tokenize

MAX_DEPTH = 80

CONSTANTS = {"e": "e", "i": "i", r"\pi": "pi", r"\infty": "infinity", r"\imath": "i", r"\mathrm{i}": "i"}
_BRACKETS = {"(": ")", "{": "}", "[": "]", "|": "|", r"\{": r"\}", r"\|": r"\|"}
_ROUNDED = {r"\lfloor": (r"\rfloor", "floor"), r"\lceil": (r"\rceil", "ceil"), r"\lvert": (r"\rvert", "abs")}
_STARTS = frozenset({"(", "{", "[", *_ROUNDED, r"\frac", r"\sqrt", r"\binom", r"\cbrt", r"\abs"})
_STOPS = frozenset({r"\rfloor", r"\rceil", r"\rvert", r"\}", r"\%", r"\circ", r"\mod", r"\pmod", r"\bmod"})


class Node(NamedTuple):
    """A number (`value`), a symbol or constant (`name`), or an operation (`name`) on other nodes."""

    kind: str
    """number, symbol, constant or operation"""
    name: str = ""
    value: Fraction = Fraction(0)
    parts: tuple[Node, ...] = ()

    def walk(self) -> Iterator[Node]:
        """Itself and everything below."""
        yield self
        for part in self.parts:
            yield from part.walk()


def number(value: Fraction | int) -> Node:
    """A number's node."""
    return Node("number", value=Fraction(value))


def operation(name: str, *parts: Node) -> Node:
    """An operation's node."""
    return Node("operation", name, parts=parts)


@lru_cache(maxsize=4096)
def parse(text: str) -> Node:
    """The tree of an expression, remembered because the samples of a group share a label and often an answer.

    Raises:
        Unparsable: when it is no expression.
    """
    parser = _Parser(tokenize(text))
    result = parser.sum()
    if parser.position < len(parser.tokens):
        raise Unparsable(f"unexpected {parser.peek()!r}")
    return result


class _Parser:
    """Recursive descent over a token list; a method a rule."""

    def __init__(self, tokens: Sequence[Token]):
        self.tokens = tokens
        self.position = 0
        self.depth = 0
        self.bars = 0
        """How many `|...|` are open: inside one, a bar closes it."""

    def peek(self, ahead: int = 0) -> Token:
        index = self.position + ahead
        return self.tokens[index] if index < len(self.tokens) else ""

    def take(self, *expected: Token) -> Token:
        token = self.peek()
        if not token or (expected and token not in expected):
            raise Unparsable(f"{' or '.join(expected)} is missing")
        self.position += 1
        return token

    def skip(self, *wanted: Token) -> Token:
        return self.take() if self.peek() in wanted and self.peek() else ""

    def sum(self) -> Node:
        total = self.product()
        while sign := self.skip("+", "-"):
            total = operation("add" if sign == "+" else "sub", total, self.product())
        return total

    def deepen(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooLarge("nested too deeply")

    def product(self) -> Node:
        result = self.signed()
        while True:
            if self.skip("/"):
                result = operation("div", result, self.signed())
            elif self.skip("*"):
                result = operation("mul", result, self.signed())
            elif self.starts_factor():
                result = operation("mul", result, self.power())
            else:
                return result

    def starts_factor(self) -> bool:
        """Whether a factor follows without a sign: `2x`, `3\\pi`, `x(x+1)`; never number after number."""
        token = self.peek()
        if token[:1].isdigit() or token.startswith("."):
            return self.tokens[self.position - 1] in (")", "}", "]", r"\}", "!")
        if token == "|":
            return self.bars == 0
        if token in _STOPS or not token:
            return False
        return token[0].isalpha() or token in _STARTS or (token.startswith("\\") and token[1:].isalpha())

    def signed(self) -> Node:
        negative = False
        while sign := self.skip("+", "-"):
            negative ^= sign == "-"
        result = self.power()
        return operation("neg", result) if negative else result

    def power(self) -> Node:
        base = self.postfix(self.atom())
        if not self.skip("^", "**"):
            return base
        if self.skip(r"\circ") or (self.peek() == "{" and self.peek(1) == r"\circ" and self.peek(2) == "}"):
            self.position += 3 if self.peek() == "{" else 0
            return self.postfix(operation("degrees", base))
        self.deepen()
        exponent = self.exponent()
        self.depth -= 1
        return self.postfix(operation("pow", base, exponent))

    def exponent(self) -> Node:
        """In LaTeX one token without braces: `x^10` is still read as a whole number, as people mean it."""
        return self.signed()

    def postfix(self, result: Node) -> Node:
        while token := self.skip("!", "!!", r"\%"):
            if token == r"\%":
                result = operation("div", result, number(100))
            else:
                result = operation("factorial" if token == "!" else "double_factorial", result)
        return result

    def atom(self) -> Node:
        self.deepen()
        result = self.starting_with(self.take())
        self.depth -= 1
        return result

    def starting_with(self, token: Token) -> Node:
        if token[0].isdigit() or token[0] == ".":
            return number(Fraction(token))
        if token in _BRACKETS:
            return self.bracketed(token, _BRACKETS[token], "abs" if token in ("|", r"\|") else "")
        if token in _ROUNDED:
            return self.bracketed(token, *_ROUNDED[token])
        if token[0].isalpha():
            return self.symbol(token)
        if token.startswith("\\"):
            return self.command(token)
        raise Unparsable(f"unexpected {token!r}")

    def bracketed(self, opening: Token, closing: Token, name: str) -> Node:
        bars = self.bars
        self.bars = bars + 1 if opening == "|" else 0
        inner = self.sum()
        self.take(closing)
        self.bars = bars
        return operation(name, inner) if name else inner

    def symbol(self, name: str) -> Node:
        if self.skip("_"):
            if self.skip("{"):
                name += "_"
                while not self.skip("}"):
                    name += self.take()
            else:
                name = f"{name}_{self.take()}"
        elif name in CONSTANTS:
            return Node("constant", CONSTANTS[name])
        return Node("symbol", name)

    def command(self, token: Token) -> Node:
        name = token[1:]
        if token in CONSTANTS:
            return Node("constant", CONSTANTS[token])
        if name == "Gamma" and self.peek() == "(":
            return operation("factorial", operation("sub", self.atom(), number(1)))
        if name in GREEK:
            return self.symbol(token)
        if name == "frac":
            return operation("div", self.braced(), self.braced())
        if name == "binom":
            return operation("binomial", self.braced(), self.braced())
        if name == "sqrt":
            return self.root()
        if name == "cbrt":
            return operation("root", self.atom(), number(3))
        if name == "abs":
            return operation("abs", self.atom())
        if name == "cis":
            angle = operation("mul", Node("constant", "i"), self.argument())
            return operation("pow", Node("constant", "e"), angle)
        if name in FUNCTIONS:
            return self.function(name)
        raise Unparsable(f"the command {token!r}")

    def braced(self) -> Node:
        return self.bracketed(self.take("{"), "}", "")

    def root(self) -> Node:
        degree = number(2)
        if self.skip("["):
            degree = self.sum()
            self.take("]")
        return operation("root", self.atom(), degree)

    def function(self, name: str) -> Node:
        exponent = base = None
        if name in ("log", "lg") and self.skip("_"):
            base = self.atom()
        if self.skip("^"):
            exponent = self.signed_atom()
            if exponent == operation("neg", number(1)) and name in INVERSES:
                name, exponent = INVERSES[name], None
        if name == "log" and base is None and self.skip("_"):
            base = self.atom()
        argument = self.argument()
        # without a base `log` is the common one in school notation
        parts = (argument, base or number(10)) if name in ("log", "lg") else (argument,)
        result = operation("log" if name == "lg" else name, *parts)
        return operation("pow", result, exponent) if exponent else result

    def signed_atom(self) -> Node:
        return operation("neg", self.atom()) if self.skip("-") else self.atom()

    def argument(self) -> Node:
        """A bracketed argument, or the run of numbers, symbols and fractions behind the function's name."""
        if self.peek() in ("(", "[") or self.peek() in _ROUNDED:
            return self.postfix(self.atom())
        result = self.power()
        while self.peek() and (self.peek()[0].isalpha() or self.peek() == r"\pi" or self.peek()[1:] in GREEK):
            result = operation("mul", result, self.power())
        return result
