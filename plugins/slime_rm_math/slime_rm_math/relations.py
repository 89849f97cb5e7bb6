"""Equations and inequalities: against one another, and against the values and intervals they stand for."""

from __future__ import annotations

import re
from collections.abc import Callable

from slime_rm_math.expression import Node, operation
from slime_rm_math.identity import proportional, symbols
from slime_rm_math.structure import INFINITY, Expression, Items, Relation, Sets, Unread, Value, as_node, is_name, read

Same = Callable[[Value, Value], bool | None]

_FUNCTION = re.compile(r"[fghF]\(x\)")
_FLIPPED = {"<": ">", ">": "<", "le": "ge", "ge": "le", "=": "=", "ne": "ne"}
_INFINITY = read(INFINITY)
_MINUS_INFINITY = read(rf"-{INFINITY}")


def same_relation(answer: Value, label: Value, same: Same) -> bool | None:
    """Compare two values at least one of which is a relation; None where only a full parser can tell."""
    left, right = _membership(answer), _membership(label)
    if left is not answer or right is not label:
        return same(left, right)
    if isinstance(answer, Relation) and isinstance(label, Relation):
        return _same_relations(answer, label, same)
    if isinstance(answer, Relation):
        return _against_value(answer, label, same, lenient=True)
    if isinstance(label, Relation):
        return _against_value(label, answer, _swapped(same), lenient=False)
    return None


def as_intervals(value: Value) -> Value | None:
    """The set that an inequality of one name, or a list of such, stands for; None for anything else."""
    if isinstance(value, Relation):
        return _interval(value)
    if isinstance(value, Items) and not value.opening and all(isinstance(item, Relation) for item in value.items):
        parts = [_interval(item) for item in value.items if isinstance(item, Relation)]
        return Sets("cup", tuple(part for part in parts if part is not None)) if all(parts) else None
    return None


def _swapped(same: Same) -> Same:
    return lambda left, right: same(right, left)


def _membership(value: Value) -> Value:
    r"""`x \in S` is S."""
    if isinstance(value, Relation) and value.operators == ("in",):
        return value.sides[1]
    return value


def _against_value(relation: Relation, value: Value, same: Same, lenient: bool) -> bool | None:
    """A relation against what is none; `lenient` lets any equation stand for its last side, as a chain does."""
    if relation.is_equation:
        if is_name(relation.texts[-1]) and not is_name(relation.texts[0]):
            return same(relation.sides[0], value)
        if lenient or len(relation.sides) > 2 or is_name(relation.texts[0]):
            return same(relation.sides[-1], value)
        return False
    if isinstance(value, Items | Sets):
        interval = _interval(relation)
        return None if interval is None else same(interval, value)
    return None if isinstance(value, Unread) else False


def _same_relations(answer: Relation, label: Relation, same: Same) -> bool | None:
    if answer.is_equation and label.is_equation:
        return _same_equations(answer, label, same)
    for other in (label, _reversed(label)):
        if answer.operators == other.operators:
            verdicts = [same(a, b) for a, b in zip(answer.sides, other.sides, strict=True)]
            if all(verdicts):
                return True
    first, second = _interval(answer), _interval(label)
    if first is not None and second is not None:
        named = {_subject(answer), _subject(label)}
        return same(first, second) if len(named) == 1 else False
    if len(answer.operators) == len(label.operators) == 1:
        return _same_inequality(answer, label)
    return None


def _same_equations(answer: Relation, label: Relation, same: Same) -> bool | None:
    names = answer.texts[0], label.texts[0]
    both_name = is_name(names[0]) and is_name(names[1])
    if both_name and (names[0] == names[1] or _heads(names)):
        verdict = same(answer.sides[-1], label.sides[-1])
        if verdict is not False or (_explicit(answer) and _explicit(label)):
            return verdict
    elif len(answer.sides) == len(label.sides) == 2 and all(
        same(a, b) for a, b in zip(answer.sides, reversed(label.sides), strict=True)
    ):
        return True
    if len(answer.sides) != 2 or len(label.sides) != 2:
        return False if both_name else None
    first, second = _difference(answer), _difference(label)
    if first is None or second is None:
        return False if both_name else None
    if proportional(first, second) is not None:
        return True
    constants = all(not _has_symbols(side.sides[1]) for side in (answer, label))
    return False if both_name and constants else None


def _heads(names: tuple[str, str]) -> bool:
    """`W(n)` and `W(x)` name the same function; `y` and `f(x)` may."""
    if any(name == "y" and _FUNCTION.fullmatch(other) for name, other in (names, names[::-1])):
        return True
    heads = [name.partition("(") for name in names]
    same_name = bool(heads[0][0]) and heads[0][0] == heads[1][0]
    return same_name and all(argument.rstrip(")").isalpha() for _, _, argument in heads)


def _explicit(equation: Relation) -> bool:
    """Whether it defines its name by an expression without that name."""
    return len(equation.sides) == 2 and names_in(equation.sides[0]).isdisjoint(names_in(equation.sides[1]))


def names_in(value: Value) -> frozenset[str]:
    """Symbols of a value that is an expression."""
    node = as_node(value)
    return frozenset() if node is None else symbols(node)


def _has_symbols(value: Value) -> bool:
    return as_node(value) is None or bool(names_in(value))


def _same_inequality(answer: Relation, label: Relation) -> bool | None:
    """Whether the differences of the sides are multiples of each other, with the sign that the directions ask for."""
    first, second = _difference(answer), _difference(label)
    if first is None or second is None:
        return None
    sign = proportional(first, second)
    if sign is None:
        return None
    wanted = label.operators if sign > 0 else tuple(_FLIPPED.get(operator, "") for operator in label.operators)
    return answer.operators == wanted


def _difference(relation: Relation) -> Node | None:
    nodes = [as_node(side) for side in relation.sides]
    return None if nodes[0] is None or nodes[1] is None else operation("sub", nodes[0], nodes[1])


def _reversed(relation: Relation) -> Relation:
    flipped = tuple(_FLIPPED.get(operator, operator) for operator in reversed(relation.operators))
    return Relation(relation.sides[::-1], flipped, relation.texts[::-1])


def _subject(relation: Relation) -> str:
    name = next((text for text in relation.texts if is_name(text)), "")
    return name.strip("|") if len(name) == 3 else name


def _interval(relation: Relation) -> Value | None:
    r"""`x < 3`, `3 > x`, `1 < x \le 2`, `|x| < 3` as an interval; `x \ne 3`, `|x| > 3` as a union."""
    if relation.operators == ("ne",) and is_name(relation.texts[0]) and isinstance(relation.sides[0], Expression):
        hole = relation.sides[1]
        return Sets("cup", (Items("(", (_MINUS_INFINITY, hole), ")"), Items("(", (hole, _INFINITY), ")")))
    if not set(relation.operators) <= {"<", ">", "le", "ge"}:
        return None
    if len(relation.sides) == 2 and (of_size := _of_size(relation)) is not None:
        return of_size
    if relation.operators[0] in (">", "ge"):
        relation = _reversed(relation)
    if not set(relation.operators) <= {"<", "le"}:
        return None
    named = [
        is_name(text) and isinstance(side, Expression)
        for text, side in zip(relation.texts, relation.sides, strict=True)
    ]
    bounds = relation.sides
    if named == [True, False]:
        return Items("(", (_MINUS_INFINITY, bounds[1]), ")" if relation.operators[0] == "<" else "]")
    if named == [False, True]:
        return Items("(" if relation.operators[0] == "<" else "[", (bounds[0], _INFINITY), ")")
    if named == [False, True, False]:
        opening, closing = (
            ("(" if relation.operators[0] == "<" else "["),
            (")" if relation.operators[1] == "<" else "]"),
        )
        return Items(opening, (bounds[0], bounds[2]), closing)
    return None


def _of_size(relation: Relation) -> Value | None:
    """`|x| < 3` and `|x| > 3`, for a variable of one letter."""
    if not _is_size(relation.texts[0]):
        relation = _reversed(relation)
    bound = relation.sides[1]
    if not _is_size(relation.texts[0]) or as_node(bound) is None:
        return None
    negative, (operator,) = read(f"-({relation.texts[1]})"), relation.operators
    if operator in ("<", "le"):
        return Items("(", (negative, bound), ")") if operator == "<" else Items("[", (negative, bound), "]")
    closed = operator == "ge"
    left = Items("(", (_MINUS_INFINITY, negative), "]" if closed else ")")
    return Sets("cup", (left, Items("[" if closed else "(", (bound, _INFINITY), ")")))


def _is_size(text: str) -> bool:
    return len(text) == 3 and text[0] == text[2] == "|" and text[1].isalpha()
