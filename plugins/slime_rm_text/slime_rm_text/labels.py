"""The texts that a label accepts."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


def accepted_texts(label: Any) -> list[str]:
    """A label as texts: a text, a number, or a list of them, any of which is right.

    Raises:
        ValueError: when the label holds nothing to compare with; the sample is then FAILED, not wrong.
    """
    if isinstance(label, list | tuple):
        if not label:
            raise ValueError("the label is an empty list; give at least one accepted answer")
        return [_text(entry) for entry in label]
    return [_text(label)]


def _text(label: Any) -> str:
    if isinstance(label, str) and label.strip():
        return label
    if isinstance(label, bool):
        return "yes" if label else "no"
    if isinstance(label, Integral):
        return str(int(label))
    if isinstance(label, Real) and math.isfinite(label):
        return repr(float(label))
    raise ValueError(
        f"the label {label!r} cannot be compared with an answer; a label is a text, a number or a list of these "
        "(--label-key names the field of the row)"
    )
