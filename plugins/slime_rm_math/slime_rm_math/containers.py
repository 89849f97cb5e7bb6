"""Matrices, lists, tuples, intervals and sets, compared part by part."""

from __future__ import annotations

from slime_rm_math.relations import Same, as_intervals
from slime_rm_math.structure import Expression, Items, Matrix, Relation, Sets, Unread, Value, Words


def same_matrix(left: Value, right: Value, same: Same) -> bool | None:
    """Entry by entry; a column or a row of numbers is also the tuple of them."""
    first, second = _rows(left), _rows(right)
    if first is None or second is None or len(first) != len(second):
        return _same_vector(left, right, same)
    if any(len(a) != len(b) for a, b in zip(first, second, strict=True)):
        return _same_vector(left, right, same)
    return _all(same(a, b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True))


def _rows(value: Value) -> tuple[tuple[Value, ...], ...] | None:
    return value.rows if isinstance(value, Matrix) else None


def _same_vector(left: Value, right: Value, same: Same) -> bool | None:
    if isinstance(left, Unread | Expression) or isinstance(right, Unread | Expression):
        return None
    first, second = _vector(left), _vector(right)
    if first is None or second is None or len(first) != len(second):
        return False
    if isinstance(left, Matrix) and isinstance(right, Matrix):
        return False
    return _all(map(same, first, second))


def _vector(value: Value) -> tuple[Value, ...] | None:
    if isinstance(value, Items) and value.opening in ("(", "["):
        return value.items
    if isinstance(value, Matrix) and len(value.rows) == 1:
        return value.rows[0]
    if isinstance(value, Matrix) and all(len(row) == 1 for row in value.rows):
        return tuple(row[0] for row in value.rows)
    return None


def same_sets(left: Value, right: Value, same: Same) -> bool | None:
    if isinstance(left, Words) or isinstance(right, Words):
        return False
    first, second = as_intervals(left) or left, as_intervals(right) or right
    if isinstance(first, Sets) and isinstance(second, Sets):
        if first.operator != second.operator:
            return None
        if len(first.parts) != len(second.parts):
            return None
        if first.operator == "setminus":
            return _all(map(same, first.parts, second.parts))
        return _same_unordered(first.parts, second.parts, same)
    if any(isinstance(side, Sets) and side.operator == "empty" for side in (first, second)):
        return False
    return None


def same_items(left: Value, right: Value, same: Same) -> bool | None:
    if not isinstance(left, Items) or not isinstance(right, Items):
        items, other = (left, right) if isinstance(left, Items) else (right, left)
        if isinstance(items, Items) and not items.ordered and len(items.items) == 1:
            return same(items.items[0], other)
        return False if not isinstance(other, Unread) else None
    if left.ordered and right.ordered:
        if (left.opening, left.closing) != (right.opening, right.closing):
            return False
    elif left.ordered != right.ordered and r"\{" in (left.opening, right.opening):
        return False
    first, second = _named_apart(left.items), _named_apart(right.items)
    if left.ordered or right.ordered:
        return len(first) == len(second) and _all(map(same, first, second))
    is_set = left.opening == right.opening == r"\{"
    if is_set or len(first) != len(second):
        first, second = _distinct(first, is_set), _distinct(second, is_set)
    return len(first) == len(second) and _same_unordered(first, second, same)


def _named_apart(items: tuple[Value, ...]) -> tuple[Value, ...]:
    """`x=1,2` names its first item only: without the name, where the others have none."""
    first = items[0]
    if (
        isinstance(first, Relation)
        and first.operators == ("=",)
        and not any(isinstance(i, Relation) for i in items[1:])
    ):
        return (first.sides[1], *items[1:])
    return items


def _distinct(items: tuple[Value, ...], is_set: bool) -> tuple[Value, ...]:
    """Without repeated tuples; a number may be twice in a bare list, as a double root."""
    return tuple(
        item for n, item in enumerate(items) if not (is_set or isinstance(item, Items)) or item not in items[:n]
    )


def _same_unordered(left: tuple[Value, ...], right: tuple[Value, ...], same: Same) -> bool | None:
    remaining = list(right)
    unknown = False
    for item in left:
        verdicts = [(other, same(item, other)) for other in remaining]
        match = next((other for other, verdict in verdicts if verdict), None)
        if match is None:
            if not any(verdict is None for _, verdict in verdicts):
                return False
            unknown = True
            continue
        remaining.remove(match)
    return None if unknown else True


def _all(verdicts: object) -> bool | None:
    """True when all are, False when one is, None when that stays open."""
    found = list(verdicts)  # type: ignore[call-overload]
    if False in found:
        return False
    return None if None in found else True
