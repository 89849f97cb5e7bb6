"""One spelling for what LaTeX, and models, write in many ways."""

from __future__ import annotations

import re
from typing import NamedTuple

# minus signs, products, degrees, spaces and (full-width) digits that are not ASCII
_CHARACTERS: dict[str, str] = {
    "\u2212": "-",
    "\u2013": "-",
    "\u00d7": "*",
    "\u00b7": "*",
    "\u22c5": "*",
    "\u00f7": "/",
    "\u00b0": "",
    "\u00a0": " ",
    "\u221e": r"\infty ",
    "\u03c0": r"\pi ",
    "\u221a": r"\sqrt ",
    **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
}
_TABLE = str.maketrans(_CHARACTERS)
_TEXT = r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|mathit|operatorname)\s*\{([^{}]*)\}"

_LATEX = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![a-zA-Z])|\\[!()]|\\?\$", ""),
        (r"\{,\}", ","),
        (r"(?<=\d)(?:\\[, ]|~| )(?=\d{3}(?!\d))", ""),
        (r"\\[,;: ]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:cdot|times)(?![a-zA-Z])", "*"),
        (r"\\div(?![a-zA-Z])", "/"),
        (r"\\(le|ge|ne)q(?![a-zA-Z])", r"\\\1"),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![a-zA-Z])|(?<=\d)\s*degrees?\b", ""),
        (r"\\%|(?<=\d)\s*per ?cent\b", "%"),
        (r"(?<=\d)\s*dollars?\b", ""),
        (r"(?<![a-zA-Z\\])infinity\b", r"\\infty"),
        (r"(\d)\s+(\d+)/(\d+)", r"\1\\frac{\2}{\3}"),
    ]
]
_TIDY = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r",\s+", ";"),
        (r"\s+(?!\d)|(?<!\d)\s+", ""),
        (r"\\frac(\d)(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac(\{[^{}]*\})(\d)", r"\\frac\1{\2}"),
        (r"\\frac(\d)\{", r"\\frac{\1}{"),
        (r"\\sqrt(\w)", r"\\sqrt{\1}"),
    ]
]
_TEXT_MACRO = re.compile(_TEXT)
_TEXT_UNIT = re.compile(rf"(?<=[\d}})%])\s*{_TEXT}(\^\{{?[23]\}}?)?[\s.]*$")
_WORD_UNIT = re.compile(r"(?<=[\d%])\s+([a-zA-Z]{3,}|[cmk]m|kg|ft|mi|lb|oz|ml)(\^\{?[23]\}?)?[\s.]*$")
_NOT_UNITS = frozenset({"and", "sqrt", "infty"})
_NAME = re.compile(r"\s*([a-zA-Z]\w?(?:\([a-zA-Z]\))?)\s*(?:=|\\in(?![a-zA-Z]))(?!=)")
_CHOICE = re.compile(r"\(([A-Z])\)")


class Spelled(NamedTuple):
    """An answer in the common spelling: `x = 7\\text{ cm}` is text `7`, name `x`, unit `cm`."""

    text: str
    name: str
    unit: str

    def agrees_with(self, other: Spelled) -> bool:
        """Whether name and unit are the same, or missing on one side."""
        names = not self.name or not other.name or self.name == other.name
        return names and (not self.unit or not other.unit or self.unit == other.unit)


def respell(answer: str) -> Spelled:
    r"""Take away spelling: `\dfrac`, `\left`, `$`, spaces, text macros, units, a leading `x =`, a final full stop.

    A comma followed by space, which separates and never groups digits, becomes a semicolon.
    """
    text = answer.translate(_TABLE)
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    text, unit = _split_unit(text)
    text = _TEXT_MACRO.sub(r"\1", text)
    text, name = _split_name(text)
    text = text.strip().rstrip(".")
    for pattern, replacement in _TIDY:
        text = pattern.sub(replacement, text)
    return Spelled(_unwrap(text), name, unit)


def _split_unit(text: str) -> tuple[str, str]:
    match = _TEXT_UNIT.search(text) or _WORD_UNIT.search(text)
    if match is None or match[1].strip().lower() in _NOT_UNITS:
        return text, ""
    power = re.sub(r"[^23]", "", match[2] or "")
    return text[: match.start()], match[1].strip().lower().removesuffix("s") + power


def _split_name(text: str) -> tuple[str, str]:
    match = _NAME.match(text)
    return (text[match.end() :], match[1]) if match else (text, "")


def _unwrap(text: str) -> str:
    """Drop braces around everything, a plus in front, the parentheses of a choice `(A)`, and the case of words."""
    if text.startswith("{") and text.endswith("}") and "{" not in text[1:-1]:
        text = text[1:-1]
    if choice := _CHOICE.fullmatch(text):
        text = choice[1]
    text = text.removeprefix("+")
    return text.casefold() if len(text) > 1 and text.isalpha() else text
