"""What is compared: the answer inside a response, and the answers a label accepts."""

from __future__ import annotations

import math
import re
from numbers import Integral, Real
from typing import Any

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
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
    if isinstance(label, str) and label.strip():
        return last_boxed(label) or label.strip()
    if isinstance(label, Integral) and not isinstance(label, bool):
        return str(int(label))
    # repr: the decimal as it was written, not its binary value
    if isinstance(label, Real) and not isinstance(label, bool) and math.isfinite(label):
        return repr(float(label))
    raise ValueError(
        f"the label {label!r} cannot be compared with an answer; a label is a number, a text or a list of these "
        "(--label-key names the field of the row)"
    )
