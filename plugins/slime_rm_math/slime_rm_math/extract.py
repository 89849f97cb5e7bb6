"""What is compared: the answer inside a response, and the answers a label accepts."""

from __future__ import annotations

import math
import re
from numbers import Integral, Real
from typing import Any

from slime_rm_math.prose import answer_in_prose

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
JOINING = re.compile(r"\b(?:and|or)\b|[,;]")
MAX_CHAIN = 16
CLOSE_BY, NEAR_BY = 10, 70
"""Boxes that so few characters part are one answer, the second with a comma or an `and` among them."""

BRACE = re.compile(r"\\[\\{}]|[{}]")
"""A brace that groups, or an escaped one, which is text."""


def last_boxed(response: str) -> str | None:
    r"""The content of the last \boxed{...} or \fbox{...} whose braces close; None when there is none.

    Takes time linear in the response, whatever it holds.
    """
    end = len(response)
    for start in reversed([box.end() for box in BOX.finditer(response)]):
        close = _closing_brace(response, start, end)
        if close is not None:
            return response[start:close].strip()
        # a box that holds an unclosed one cannot close behind it, so the next search ends here
        end = start
    return None


def boxed_answers(response: str) -> list[str]:
    r"""The last box's content; then, where boxes form a chain (`\boxed{1} and \boxed{2}`), all of them joined."""
    boxes = _boxes(response)
    if not boxes:
        return []
    chain = boxes[:1]
    for start, close in boxes[1:]:
        between, _, _ = response[close + 1 : chain[-1][0]].rpartition("\\")
        if not _continues(between):
            break
        chain.append((start, close))
    contents = list(dict.fromkeys(response[start:close].strip() for start, close in reversed(chain)))
    return [contents[-1]] if len(contents) == 1 else [response[slice(*boxes[0])].strip(), ", ".join(contents)]


def _boxes(text: str) -> list[tuple[int, int]]:
    """Where the contents of the outermost closed boxes start and end, last first."""
    found: list[tuple[int, int]] = []
    end = len(text)
    for start in reversed([box.end() for box in BOX.finditer(text)]):
        close = _closing_brace(text, start, end)
        end = start
        if close is None:
            continue
        found.append((start, close))
        if len(found) >= MAX_CHAIN:
            break
    return found


def _continues(between: str) -> bool:
    """Whether what stands between two boxes joins them."""
    if len(between) < CLOSE_BY:
        return True
    return len(between) < NEAR_BY and JOINING.search(between) is not None


def _closing_brace(text: str, start: int, end: int) -> int | None:
    """Where the brace opened just before `start` closes."""
    depth = 1
    for brace in BRACE.finditer(text, start, end):
        if brace[0] == "{":
            depth += 1
        elif brace[0] == "}":
            depth -= 1
            if depth == 0:
                return brace.start()
    return None


def stated_answers(response: str) -> list[str]:
    r"""The boxed answers; without a box what the response states as its answer, its last formula or number."""
    found = boxed_answers(response)
    if found:
        return found
    stated = answer_in_prose(response)
    return [response.strip() if stated is None else stated]


def accepted_answers(label: Any) -> list[str]:
    r"""The answers that a label accepts, as text: a number, a string (which may hold a \boxed{}), or a list of them.

    Raises:
        ValueError: when the label holds nothing to compare with.
    """
    if isinstance(label, list | tuple):
        if not label:
            raise ValueError("the label is an empty list; give at least one accepted answer")
        return [_answer_text(entry) for entry in label]
    return [_answer_text(label)]


def _answer_text(label: Any) -> str:
    if isinstance(label, str) and (text := (boxed_answers(label) or BOX.split(label))[-1].strip()):
        return text
    if isinstance(label, Integral) and not isinstance(label, bool):
        return str(int(label))
    # repr: the decimal as it was written, not its binary value
    if isinstance(label, Real) and not isinstance(label, bool) and math.isfinite(label):
        return repr(float(label))
    raise ValueError(
        f"the label {label!r} cannot be compared with an answer; a label is a number, a text or a list of these "
        "(--label-key names the field of the row)"
    )
