"""Whether two answers are the same: as strings, as numbers, item by item, as expressions; the cheapest that decides."""

from __future__ import annotations

from typing import NamedTuple

from slime_rm_math.number import parse_number
from slime_rm_math.spelling import respell
from slime_rm_math.symbolic import same_value

MAX_LENGTH = 2000
"""Longer texts, in characters, are equal only as they are."""

MAX_ITEMS = 16
"""Longer lists are compared by spelling only; every pair of items may cost a symbolic comparison."""

CLOSERS = {"(": ")]", "[": "])", r"\{": (r"\}",)}


def same_answer(answer: str, label: str) -> bool:
    """Whether the answer is the label, however the two are written."""
    if answer == label:
        return answer != ""
    left, right = parse_number(answer), parse_number(label)
    if left is not None and right is not None:
        return left.equals(right)
    if len(answer) > MAX_LENGTH or len(label) > MAX_LENGTH:
        return False
    spelled, truth = respell(answer), respell(label)
    return spelled.agrees_with(truth) and _same_text(spelled.text, truth.text)


def _same_text(left: str, right: str) -> bool:
    if not left or not right:
        return False
    if left == right:
        return True
    left_number, right_number = parse_number(left), parse_number(right)
    if left_number is not None and right_number is not None:
        return left_number.equals(right_number)
    left_items, right_items = split_items(left), split_items(right)
    if left_items is None and right_items is None:
        return same_value(left, right)
    return left_items is not None and right_items is not None and _same_items(left_items, right_items)


class Items(NamedTuple):
    """A tuple, an interval, a set or a bare list; `opening` and `closing` are its brackets, empty for a bare list."""

    opening: str
    items: list[str]
    closing: str

    @property
    def ordered(self) -> bool:
        """Tuples and intervals are; sets and bare lists are not."""
        return self.opening in ("(", "[")


def split_items(text: str) -> Items | None:
    r"""Split `(1,2)`, `[0,1)`, `\{1,2\}` or `1,2` at its outer commas; None when there is none, or too many."""
    opening = next((bracket for bracket in CLOSERS if text.startswith(bracket)), "")
    closing = next((bracket for bracket in CLOSERS.get(opening, ()) if text.endswith(bracket)), "")
    if not closing:
        opening = ""
    items = _outer_items(text[len(opening) : len(text) - len(closing)])
    if items is None and opening:
        opening, closing, items = "", "", _outer_items(text)
    return Items(opening, items, closing) if items is not None and 2 <= len(items) <= MAX_ITEMS else None


def _outer_items(text: str) -> list[str] | None:
    """The parts between commas outside every bracket; None when the brackets do not balance."""
    items, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth < 0:
                return None
        elif character in ",;" and depth == 0:
            items.append(text[start:position])
            start = position + 1
    return [*items, text[start:]] if depth == 0 else None


def _same_items(left: Items, right: Items) -> bool:
    if (left.opening, left.closing) != (right.opening, right.closing) or len(left.items) != len(right.items):
        return False
    if left.ordered:
        return all(map(_same_text, left.items, right.items))
    remaining = list(right.items)
    for item in left.items:
        match = next((other for other in remaining if _same_text(item, other)), None)
        if match is None:
            return False
        remaining.remove(match)
    return True
