"""Numbers as written, parsed exactly."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

MAX_DIGITS = 400
"""Longer texts are not read as numbers: a bound on the work, far above what an answer needs."""

_DIGITS = r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_POWER_OF_TEN = r"(?:[eE](?P<e>[-+]?\d{1,3})|\*10\^(?:\{(?P<power>[-+]?\d{1,3})\}|(?P<digit>\d)))"
PLAIN = re.compile(rf"([-+]?)({_DECIMAL})(%?)", re.ASCII)
SCIENTIFIC = re.compile(rf"(?P<value>[-+]?{_DECIMAL}){_POWER_OF_TEN}", re.ASCII)
SLASHED = re.compile(rf"([-+]?{_DECIMAL})/([-+]?{_DECIMAL})(%?)", re.ASCII)
FRACTION = re.compile(rf"([-+]?)(\d*)\\frac\{{([-+]?{_DECIMAL})\}}\{{([-+]?{_DECIMAL})\}}(%?)", re.ASCII)
REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\(?:overline|bar|dot)\{?(\d+)\}?(%?)", re.ASCII)
DECIMAL_COMMA = re.compile(r"[-+]?(?:\d+,\d{1,2}|0,\d+|\d{4,},\d+|\d+,\d{4,})%?", re.ASCII)


class Number(NamedTuple):
    """An exact number; `value` is what stands before the percent sign where there is one."""

    value: Fraction
    percent: bool = False
    places: int = -1
    """Decimal places as written; -1 where it was not written as a decimal."""

    def equals(self, other: Number) -> bool:
        """Exact equality; a percentage also equals the number whose unit, per cent, was left out."""
        if self.value == other.value:
            return True
        if self.percent == other.percent:
            return False
        percentage, plain = (self, other) if self.percent else (other, self)
        return percentage.value == 100 * plain.value


def parse_number(text: str) -> Number | None:
    r"""Read `-1,234.5`, `1/2`, `\frac{1}{2}`, `3\frac{1}{2}`, `0.1\overline{6}`, maybe with `%`, `1.5*10^3`, `1e-3`.

    Returns None for anything else, division by zero included.
    """
    if len(text) > MAX_DIGITS or not text or not (text[0] in "-+.\\" or text[0].isdigit()):
        return None
    if match := PLAIN.fullmatch(text):
        sign, digits, percent = match.groups()
        return Number(_exact(sign + digits), bool(percent), len(digits.partition(".")[2]))
    for read in (_slashed, _latex_fraction, _scientific, _repeating):
        if (number := read(text)) is not None:
            return number
    return None


def decimal_comma(text: str) -> Number | None:
    """Read `2,74` as 2.74, as much of the world writes it; never what may be a thousands separator."""
    return parse_number(text.replace(",", ".")) if DECIMAL_COMMA.fullmatch(text) else None


def _exact(decimal: str) -> Fraction:
    digits = decimal.replace(",", "").removesuffix(".")
    return Fraction(digits) if "." in digits else Fraction(int(digits))


def _ratio(top: Fraction, bottom: Fraction) -> Fraction | None:
    return top / bottom if bottom else None


def _slashed(text: str) -> Number | None:
    match = SLASHED.fullmatch(text)
    if match is None:
        return None
    value = _ratio(_exact(match[1]), _exact(match[2]))
    return None if value is None else Number(value, bool(match[3]))


def _latex_fraction(text: str) -> Number | None:
    match = FRACTION.fullmatch(text)
    if match is None:
        return None
    sign, whole, top, bottom, percent = match.groups()
    value = _ratio(_exact(top), _exact(bottom))
    if value is None or (whole and value < 0):
        return None
    value += int(whole or 0)
    return Number(-value if sign == "-" else value, bool(percent))


def _scientific(text: str) -> Number | None:
    match = SCIENTIFIC.fullmatch(text)
    if match is None:
        return None
    power = int(match["e"] or match["power"] or match["digit"])
    return Number(_exact(match["value"]) * Fraction(10) ** power)


def _repeating(text: str) -> Number | None:
    match = REPEATING.fullmatch(text)
    if match is None:
        return None
    sign, whole, fixed, period, percent = match.groups()
    scale = Fraction(10) ** len(fixed)
    value = int(whole or 0) + int(fixed or 0) / scale + Fraction(int(period), 10 ** len(period) - 1) / scale
    return Number(-value if sign == "-" else value, bool(percent))
