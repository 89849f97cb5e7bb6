r"""What an answer is made of: numbers, expressions, lists, sets, intervals, unions, matrices, relations, words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from slime_rm_math.expression import Node, number, operation, parse
from slime_rm_math.number import Number, parse_number
from slime_rm_math.tokens import TooLarge, Unparsable
from slime_rm_math.units import measures, unit_name

MAX_LENGTH = 2000
"""Longer texts, in characters, are equal only as they are."""

MAX_ITEMS = 32
"""Longer lists are compared by spelling only; every pair of items may be compared."""

MAX_DEPTH = 6
INFINITY = r"\infty"


@dataclass(frozen=True)
class Words:
    """Text that is no mathematics."""

    text: str


@dataclass(frozen=True)
class Unread:
    """Mathematics that this module does not read; `too_large` when nothing else should try it either."""

    text: str
    too_large: bool = False


@dataclass(frozen=True)
class Expression:
    """Anything with a value."""

    text: str
    node: Node


@dataclass(frozen=True)
class Based:
    """Digits in a base, `204_5`."""

    digits: str
    base: str


@dataclass(frozen=True)
class Items:
    """A tuple, an interval, a set or a bare list; `opening` and `closing` are its brackets, empty for a bare list."""

    opening: str
    items: tuple[Value, ...]
    closing: str

    @property
    def ordered(self) -> bool:
        """Tuples and intervals are; sets and bare lists are not."""
        return self.opening in ("(", "[")


@dataclass(frozen=True)
class Sets:
    r"""Sets joined by `\cup`, `\cap` or `\setminus`."""

    operator: str
    parts: tuple[Value, ...]


@dataclass(frozen=True)
class Matrix:
    """Rows of entries."""

    rows: tuple[tuple[Value, ...], ...]


@dataclass(frozen=True)
class Ratio:
    """`7:32`, or a time of day."""

    parts: tuple[Value, ...]
    text: str


@dataclass(frozen=True)
class Relation:
    """A chain such as `1 < x < 2` or `y = 2x + 1`; `operators[i]` stands between sides i and i + 1."""

    sides: tuple[Value, ...]
    operators: tuple[str, ...]
    texts: tuple[str, ...]
    """The sides as written."""

    @property
    def is_equation(self) -> bool:
        """Whether all its signs are equals signs."""
        return set(self.operators) == {"="}


Value: TypeAlias = Words | Unread | Number | Expression | Based | Items | Sets | Matrix | Ratio | Relation

_RELATION = re.compile(r"\\(?:le|ge|ne|in|approx|equiv|sim|to|implies|Rightarrow)(?![a-zA-Z])|[=<>]")
_SAME_SIGNS = {"approx": "=", "sim": "=", "implies": "Rightarrow"}
_SETS = re.compile(r"\\(?:cup|cap|setminus)(?![a-zA-Z])|\\backslash")
_MATRIX = re.compile(
    r"[(\[]?\\begin\{(?:[bpBvV]?matrix|smallmatrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{([bpBvV]?)(?:matrix|smallmatrix|array)\}[)\]]?",
    re.DOTALL,
)
_SET_BUILDER = re.compile(r"(?P<name>[a-z])(?:\\in ?\\mathbb\{R\})?[|:](?=[^|:]*(?P=name))([^|:]+)")
_SEPARATOR = re.compile(r"[,;]")
_COLON = re.compile(r":")
_BASED = re.compile(r"\(?([0-9A-Fa-f]+)\)?_(?:\{(\d{1,2}|[a-z]{3,8})\}|(\d{1,2}))")
_BASES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_DATE = re.compile(r"([12]\d{3})([-/])(\d{1,2})\2(\d{1,2})|(\d{1,2})([-/.])(\d{1,2})\6([12]\d{3})")
_COMPOUND = re.compile(r"(?:\d+(?:\.\d+)?[a-z]{1,8})+\d+(?:\.\d+)?(?:[a-z]{1,8})?")
_ANGLE = re.compile(r"\\angle ?([A-Z]'?)([A-Z]'?)([A-Z]'?)")
_ELSEWHERE = re.compile(r"\\frac\{(?:d|\\partial)\}\{(?:d|\\partial) ?[a-z]\}|\\zeta\(")
"""Derivatives and functions that only the full parser knows; they would read as products."""

_WORD = re.compile(r"[^\W\d_]{3,}(?![a-zA-Z(])")
_MATHEMATICAL = re.compile(r"[\\^_=+*/<>|!\d]")
_OPENING = {"(": ")", "[": "]", "{": "}"}
_NAME_PART = r"\\?[a-zA-Z]+'*(?:_(?:\{[^{}]*\}|\w))?'*(?:\^\{?-1\}?)?(?:\(-?[\w.,;/ \\{}]*\))?"
_PLAIN_NAME = re.compile(rf"(?:(?>{_NAME_PART})|[{{}}()|:,; ])++")


@lru_cache(maxsize=4096)
def read(text: str, depth: int = 0) -> Value:
    """The structure of a respelled text; remembered, as the samples of a group share a label and often an answer."""
    if (found := parse_number(text)) is not None:
        return found
    if len(text) > MAX_LENGTH or depth > MAX_DEPTH:
        return Unread(text, too_large=True)
    if name := _date(text) or _angle(text) or _compound(text):
        return Words(name)
    if matrix := _MATRIX.fullmatch(text):
        return _matrix(text, matrix[1], matrix[2], depth)
    for reading in (_pair_lists, _listed, _related, _joined, _bracketed, _ratio):
        if (value := reading(text, depth)) is not None:
            return value
    if based := _BASED.fullmatch(text):
        base = based[2] or based[3]
        if base in _BASES:
            base = str(2 + _BASES.index(base))
        if base.isdigit() and _are_digits(based[1], int(base)):
            return Based(based[1].lower(), base)
    return _expression(text)


def _are_digits(text: str, base: int) -> bool:
    """Whether it is a number in the base; a letter alone is a name with an index, `a_{12}`."""
    return (len(text) > 1 or text.isdigit()) and all(int(digit, 16) < base for digit in text)


def _date(text: str) -> str | None:
    """`2024-05-01`, `12/25/2021`: a date and no arithmetic; without leading zeros."""
    match = _DATE.fullmatch(text)
    if match is None:
        return None
    numbers = [int(number) for number in match.group(1, 3, 4, 5, 7, 8) if number]
    small = [number for number in numbers if number < 1000]
    return "/".join(map(str, numbers)) if all(0 < number <= 31 for number in small) else None


def _compound(text: str) -> str | None:
    """`3ft4in`, `2h30min`, maybe without the last unit."""
    match = _COMPOUND.fullmatch(text)
    return text if match and all(measures(unit_name(unit, "")) for unit in re.findall(r"[a-z]+", text)) else None


def _angle(text: str) -> str | None:
    """An angle by three points, which the outer two may change places in."""
    match = _ANGLE.fullmatch(text)
    return None if match is None else rf"\angle {min(match[1], match[3])}{match[2]}{max(match[1], match[3])}"


def is_name(text: str) -> bool:
    r"""Whether it only names something: `x`, `f(x)`, `(p,q)`, `AB`, `|AB|`, `S_{ABC}:S`, `\frac{NO}{BO}`."""
    return bool(_PLAIN_NAME.fullmatch(text)) and any(character.isalpha() for character in text)


def split_outside(text: str, separator: re.Pattern[str]) -> list[str] | None:
    """The parts and separators, in turn, at matches outside every bracket; None when brackets do not pair.

    `[0,1)` pairs, as intervals need.
    """
    parts: list[str] = []
    depth = start = position = 0
    while position < len(text):
        character = text[position]
        if text.startswith((r"\{", r"\}"), position):
            depth += 1 if text[position + 1] == "{" else -1
            position += 2
        elif character in "([{":
            depth += 1
            position += 1
        elif character in ")]}":
            depth -= 1
            position += 1
        elif depth == 0 and (match := separator.match(text, position)):
            parts += [text[start:position], match[0]]
            start = position = match.end()
        elif character == "\\":
            command = re.compile(r"\\(?:[a-zA-Z]+|.)?", re.DOTALL).match(text, position)
            position = command.end() if command else position + 1
        else:
            position += 1
        if depth < 0:
            return None
    return [*parts, text[start:]] if depth == 0 else None


def _parts(text: str, separator: re.Pattern[str]) -> list[str]:
    """The parts at outer separators; one part where there is none, or too many."""
    split = split_outside(text, separator)
    return split[::2] if split and len(split) <= 2 * MAX_ITEMS else [text]


def _pair_lists(text: str, depth: int) -> Value | None:
    """`p=5,q=2;p=7,q=2`: a list of tuples, when both kinds of separators are used and each group has names."""
    groups = _parts(text, re.compile(r";"))
    if len(groups) < 2 or not all("=" in group and "," in group for group in groups):
        return None
    pairs = [read(group, depth + 1) for group in groups]
    if all(isinstance(pair, Items) and not pair.opening for pair in pairs):
        return Items("", tuple(Items("(", pair.items, ")") for pair in pairs if isinstance(pair, Items)), "")
    return None


def _listed(text: str, depth: int) -> Value | None:
    """A bare list; each part is read by itself, `x=1,2` names its first item only."""
    parts = _parts(text, _SEPARATOR)
    if len(parts) < 2:
        return None
    parts = [part for part in parts if part]
    if len(parts) == 1:
        return read(parts[0], depth + 1)
    return Items("", tuple(read(part, depth + 1) for part in parts), "") if parts else None


def _related(text: str, depth: int) -> Value | None:
    split = split_outside(text, _RELATION)
    if split is None or len(split) < 3 or len(split) > 2 * MAX_ITEMS:
        return None
    sides, operators = split[::2], [operator.lstrip("\\") for operator in split[1::2]]
    if "approx" in operators and (operators[0] != "approx" or (sides[0] and not is_name(sides[0]))):
        # what is only near is a comment on the exact value before it
        end = operators.index("approx")
        if end == 0:
            return read(sides[0], depth + 1)
        sides, operators = sides[: end + 1], operators[:end]
    operators = [_SAME_SIGNS.get(operator, operator) for operator in operators]
    if sides[0] == "" and len(sides) == 2:
        return read(sides[1], depth + 1) if operators == ["="] else None
    if not all(sides):
        return Unread(text)
    return Relation(tuple(read(side, depth + 1) for side in sides), tuple(operators), tuple(sides))


def _joined(text: str, depth: int) -> Value | None:
    split = split_outside(text, _SETS)
    if split is None or len(split) < 3:
        return None
    operators = {operator.lstrip("\\") for operator in split[1::2]}
    if len(operators) > 1 or not all(split[::2]):
        return Unread(text)
    operator = operators.pop()
    return Sets("setminus" if operator == "backslash" else operator, tuple(read(p, depth + 1) for p in split[::2]))


def _bracketed(text: str, depth: int) -> Value | None:
    r"""`(1,2)`, `[0,1)`, `]0,1[`, `\{1,2\}`, `(5)`; None where the brackets are not around everything."""
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return _set(text[2:-2], depth)
    if text[:1] in ("(", "[", "]") and text[-1:] in (")", "]", "["):
        opening, closing = text[0].replace("]", "("), text[-1].replace("[", ")")
        inner = text[1:-1]
        split = split_outside(inner, _SEPARATOR)
        if split is None or len(split) > 2 * MAX_ITEMS:
            return None
        if len(split) > 1:
            return Items(opening, tuple(read(part, depth + 1) for part in split[::2]), closing)
        if (opening, closing) in (("(", ")"), ("[", "]")) and text[0] == opening and inner:
            return read(inner, depth + 1)
    return None


def _set(inner: str, depth: int) -> Value | None:
    if inner == "":
        return Sets("empty", ())
    if built := _SET_BUILDER.fullmatch(inner):
        return read(built[2], depth + 1)
    split = split_outside(inner, _SEPARATOR)
    if split is None or len(split) > 2 * MAX_ITEMS or "|" in inner or ":" in inner:
        return Unread(inner)
    return Items(r"\{", tuple(read(part, depth + 1) for part in split[::2]), r"\}")


def _ratio(text: str, depth: int) -> Value | None:
    parts = _parts(text, _COLON)
    if len(parts) < 2 or not all(parts):
        return None
    return Ratio(tuple(read(part, depth + 1) for part in parts), text)


def _matrix(text: str, body: str, kind: str, depth: int) -> Value:
    if kind in ("v", "V") or r"\begin" in body:
        return Unread(text)
    rows = [row.split("&") for row in re.split(r"\\\\|\\cr", body) if row.strip()]
    if not rows or len({len(row) for row in rows}) > 1 or len(rows) * len(rows[0]) > MAX_ITEMS:
        return Unread(text)
    return Matrix(tuple(tuple(read(entry.strip(), depth + 1) for entry in row) for row in rows))


def _expression(text: str) -> Value:
    if text == r"\emptyset":
        return Sets("empty", ())
    if _ELSEWHERE.search(text):
        return Unread(text)
    if text == r"\mathbb{R}":
        infinity = Node("constant", "infinity")
        ends = Expression(r"-\infty", operation("neg", infinity)), Expression(INFINITY, infinity)
        return Items("(", ends, ")")
    if text.isalpha() and len(text) > 2:
        return Words(text.casefold())
    try:
        node = parse(text)
    except TooLarge:
        return Unread(text, too_large=True)
    except Unparsable:
        mathematical = _MATHEMATICAL.search(text) and not _WORD.search(re.sub(r"\\[a-zA-Z]+", " ", text))
        return Unread(text) if mathematical or "\\" in text else Words(text.casefold())
    return Expression(text, node)


def as_node(value: Value) -> Node | None:
    """The tree of what has a value."""
    if isinstance(value, Number):
        return number(value.value / 100 if value.percent else value.value)
    return value.node if isinstance(value, Expression) else None
