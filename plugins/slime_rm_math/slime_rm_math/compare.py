"""Whether two answers are the same: as strings, as numbers, by structure and value, and last by a full parser."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from slime_rm_math.containers import same_items, same_matrix, same_sets
from slime_rm_math.expression import Node, number, operation, parse
from slime_rm_math.full_parser import full_parser_agrees
from slime_rm_math.identity import Verdict, compare_values, rounds_to, symbols
from slime_rm_math.number import Number, decimal_comma
from slime_rm_math.prose import answer_in_prose
from slime_rm_math.relations import same_relation
from slime_rm_math.spelling import Spelled, respell
from slime_rm_math.structure import (
    MAX_LENGTH,
    Based,
    Expression,
    Items,
    Matrix,
    Ratio,
    Relation,
    Sets,
    Unread,
    Value,
    Words,
    as_node,
    read,
)
from slime_rm_math.tokens import TooLarge, Unparsable
from slime_rm_math.units import NUMBERS, exclude

__all__ = ["same_answer"]

_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![a-zA-Z])")
_WORD = re.compile(r"(?<![\\a-z])(?:[a-z]{3,}|no$)")
"""Something to compare without regard to case; letters alone are names."""

_MODULUS = re.compile(r"\(mod\w+\)$|[,;][a-z]\\in ?\\mathbb\{[ZN]\}$")
_BETWEEN_WORDS = re.compile(r", |(?<=[a-z])-(?=[a-z])")
_TIME = re.compile(r"\d{1,2}:\d\d(?::\d\d)?")
_CHOICE = re.compile(
    r"(?:option|choice) \(?(?P<named>[a-j])\)?"
    r"|\(?(?P<bracketed>[a-j])\)(?:[.:]? +(?P<rest>.+))?"
    r"|(?P<dotted>[a-j])[.:] *(?P<more>.+)"
)
"""An option letter, perhaps with what the option says, in `Spelled.words`."""


def same_answer(answer: str, label: str) -> bool:
    """Whether the answer is the label, however the two are written."""
    if answer == label:
        return answer.strip() != ""
    return _same_answer(answer, label)


@lru_cache(maxsize=4096)
def _same_answer(answer: str, label: str) -> bool:
    if len(answer) > MAX_LENGTH or len(label) > MAX_LENGTH:
        return _same_long(answer, label)
    verdict = _same_spelled(respell(answer), respell(label))
    if verdict:
        return True
    inside, stated = answer_in_prose(answer), answer_in_prose(label)
    if inside is not None or stated is not None:
        return _same_answer(answer if inside is None else inside, label if stated is None else stated)
    return verdict is None and full_parser_agrees(answer, label)


def _same_long(answer: str, label: str) -> bool:
    """Texts too long to be an answer agree in what they state, if each states something."""
    sides = [answer_in_prose(text) if len(text) > MAX_LENGTH else text for text in (answer, label)]
    return sides[0] is not None and sides[1] is not None and _same_answer(sides[0], sides[1])


def _same_spelled(answer: Spelled, label: Spelled) -> bool | None:
    """None where only a full parser can tell."""
    if not answer.text or not label.text:
        return bool(answer.words and answer.words == label.words)
    if exclude(answer.unit, label.unit):
        return False
    scales = [NUMBERS.get(side.unit.partition(" ")[0]) for side in (answer, label)]
    try:
        if scales[0] != scales[1] and None not in scales:
            return _same_text(*_scaled(answer, label, scales))
        if answer.text == label.text or (_WORD.search(answer.words) and _same_words(answer, label)):
            return True
        chosen = _same_choice(answer, label)
        if chosen is not None:
            return chosen
        verdict = _same_text(*_without_modulus(answer.text, label.text))
        if verdict is False and scales[0] != scales[1]:
            # without the unit the number may be in it, `1.5` for 1.5 million, or be the whole
            return _same_text(*_scaled(answer, label, scales)) is True
    except TooLarge:
        return False
    return verdict


def _without_modulus(left: str, right: str) -> tuple[str, str]:
    """`x \\equiv 3 \\pmod 7` as `x=3`, `k\\pi, k\\in Z` as `k\\pi` where the other side does not say so."""
    moduli = [_MODULUS.search(text) for text in (left, right)]
    if (moduli[0] is None) == (moduli[1] is None):
        return left, right
    first, second = (_MODULUS.sub("", text).replace(r"\equiv", "=") for text in (left, right))
    return first, second


def _scaled(answer: Spelled, label: Spelled, scales: list[str | None]) -> tuple[str, str]:
    r"""Both texts times the units that are numbers: `1.5\text{ million}`, `30^\circ`."""
    left, right = (
        side.text if scale is None else f"({side.text})*{scale}"
        for side, scale in zip((answer, label), scales, strict=True)
    )
    return left, right


def _same_words(answer: Spelled, label: Spelled) -> bool:
    """Commas and hyphens count for nothing between words: `May 1, 2020` and `May 1 2020`."""
    return _BETWEEN_WORDS.sub(" ", answer.words) == _BETWEEN_WORDS.sub(" ", label.words)


def _same_choice(answer: Spelled, label: Spelled) -> bool | None:
    """For multiple choice: `B`, `(B)`, `B. 12` and `(B) 12` agree; None where neither side names an option."""
    left, right = _option(answer), _option(label)
    if left is None or right is None:
        return None
    (letter, text), (other, said) = left, right
    if letter and other:
        return letter == other
    told = (text, label) if letter else (said, answer)
    return _same_text(respell(told[0]).text, told[1].text) if told[0] else None


def _option(spelled: Spelled) -> tuple[str, str] | None:
    if len(spelled.text) == 1 and "A" <= spelled.text <= "J":
        return spelled.text, ""
    match = _CHOICE.fullmatch(spelled.words)
    if match and match["named"]:
        return match["named"].upper(), ""
    if match and (match["rest"] or match["more"]):
        return (match["bracketed"] or match["dotted"]).upper(), match["rest"] or match["more"]
    return "", ""


def _same_text(left: str, right: str) -> bool | None:
    if not left or not right:
        return False
    if left == right:
        return True
    if _PLUS_MINUS.search(left) or _PLUS_MINUS.search(right):
        return _same_value(_expanded(left), _expanded(right))
    first, second = read(left), read(right)
    if isinstance(first, Items) != isinstance(second, Items):
        # `2,74` is a list of two, or a decimal as half the world writes it
        first, second = _with_comma(left, first, second), _with_comma(right, second, first)
    return _same_value(first, second)


def _with_comma(text: str, value: Value, other: Value) -> Value:
    if isinstance(value, Items) and isinstance(other, Number):
        return decimal_comma(text) or value
    return value


def _expanded(text: str) -> Value:
    r"""Both signs of `\pm` as a list, those of other items among it; a set when the text was one."""
    value = read(text) if not _PLUS_MINUS.search(text) else None
    if value is not None:
        return value
    if text.startswith(r"\{") and text.endswith(r"\}"):
        text = text[2:-2]
    signs = [{"pm": "+", "mp": "-"}, {"pm": "-", "mp": "+"}]
    items: list[Value] = []
    for part in re.split(r"[,;](?![^(]*\))", text):
        for sign in signs if _PLUS_MINUS.search(part) else signs[:1]:
            signed = _PLUS_MINUS.sub(lambda match, sign=sign: sign[match[1]], part)
            items.append(read(re.sub(r"(^|[=(\[{,;])\+", r"\1", signed)))
    return Items("", tuple(items), "")


def _same_value(left: Value, right: Value) -> bool | None:
    """Whether two structures agree; `left` is the answer."""
    if left == right:
        return True
    if isinstance(left, Relation) or isinstance(right, Relation):
        return same_relation(left, right, _same_value)
    if isinstance(left, Number) and isinstance(right, Number):
        return left.equals(right) or _rounded_fraction(left, right) or _rounded_fraction(right, left)
    if isinstance(left, Unread) or isinstance(right, Unread):
        return _same_unread(left, right)
    if isinstance(left, Ratio) or isinstance(right, Ratio):
        return _same_ratio(left, right)
    if isinstance(left, Based) or isinstance(right, Based):
        return _same_based(left, right)
    if isinstance(left, Matrix) or isinstance(right, Matrix):
        return same_matrix(left, right, _same_value)
    if isinstance(left, Sets) or isinstance(right, Sets):
        return same_sets(left, right, _same_value)
    if isinstance(left, Items) or isinstance(right, Items):
        return same_items(left, right, _same_value)
    return _same_scalar(left, right)


def _same_scalar(left: Value, right: Value) -> bool | None:
    first, second = _node(left, right), _node(right, left)
    if first is None or second is None:
        return False
    verdict = compare_values(first, second)
    if verdict is Verdict.UNKNOWN:
        return None if symbols(first) or symbols(second) else False
    if verdict is Verdict.SAME:
        return True
    return _rounded(left, second) or _rounded(right, first) or _per_cent(left, right)


def _node(value: Value, other: Value) -> Node | None:
    """The tree; of three letters that may be a word, only against an expression."""
    if isinstance(value, Words) and isinstance(other, Expression) and len(value.text) <= 3:
        try:
            return parse(" ".join(value.text))
        except Unparsable:
            return None
    return as_node(value)


def _rounded(decimal: Value, exact: Node) -> bool:
    if not isinstance(decimal, Number) or decimal.places < 1 or decimal.percent:
        return False
    return rounds_to(exact, decimal.value, decimal.places)


def _rounded_fraction(decimal: Number, fraction: Number) -> bool:
    """`0.333333` stands for `1/3`, but not for `0.3333333`, which was written as a decimal itself."""
    return fraction.places < 0 and not fraction.percent and _rounded(decimal, number(fraction.value))


def _per_cent(left: Value, right: Value) -> bool:
    r"""A percentage also equals the number whose unit, per cent, was left out."""
    if isinstance(left, Number) and left.percent and isinstance(right, Expression):
        return compare_values(number(left.value), right.node) is Verdict.SAME
    return isinstance(right, Number) and right.percent and isinstance(left, Expression) and _per_cent(right, left)


def _same_unread(left: Value, right: Value) -> bool | None:
    sides = (left, right)
    if any(isinstance(side, Unread) and side.too_large for side in sides) or any(isinstance(s, Words) for s in sides):
        return False
    return None


def _same_ratio(left: Value, right: Value) -> bool | None:
    """Ratios agree when one is a multiple of the other; times of day only as they are."""
    if isinstance(left, Ratio) and isinstance(right, Ratio):
        if _TIME.fullmatch(left.text) and _TIME.fullmatch(right.text):
            return left.text.lstrip("0") == right.text.lstrip("0")
        nodes = [[as_node(part) for part in side.parts] for side in (left, right)]
        if len(nodes[0]) != len(nodes[1]):
            return False
        if any(node is None for side in nodes for node in side):
            return all(_same_value(a, b) for a, b in zip(left.parts, right.parts, strict=True))
        crossed = [
            compare_values(operation("mul", a, nodes[1][0]), operation("mul", b, nodes[0][0]))  # type: ignore[arg-type]
            for a, b in zip(nodes[0][1:], nodes[1][1:], strict=True)
        ]
        return all(verdict is Verdict.SAME for verdict in crossed)
    ratio, other = (left, right) if isinstance(left, Ratio) else (right, left)
    quotient, whole = [as_node(part) for part in ratio.parts] if isinstance(ratio, Ratio) else [], as_node(other)
    if (
        len(quotient) != 2
        or None in quotient
        or whole is None
        or (isinstance(ratio, Ratio) and _TIME.fullmatch(ratio.text))
    ):
        return False
    return compare_values(operation("div", *quotient), whole) is Verdict.SAME  # type: ignore[arg-type]


def _same_based(left: Value, right: Value) -> bool:
    """Digits in a base equal those digits without one, or the same value in another base that is named."""
    if isinstance(left, Based) and isinstance(right, Based):
        try:
            return int(left.digits, int(left.base)) == int(right.digits, int(right.base))
        except ValueError:
            return False
    based, other = (left, right) if isinstance(left, Based) else (right, left)
    if isinstance(based, Based) and isinstance(other, Number) and based.digits.isdigit():
        return other == Number(Fraction(int(based.digits)), places=0)
    return isinstance(based, Based) and isinstance(other, Words | Expression) and other.text.lower() == based.digits
