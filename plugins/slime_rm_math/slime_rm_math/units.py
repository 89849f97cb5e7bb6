"""Units of measure: one name for each, and which of them exclude one another."""

from __future__ import annotations

import re

_SPELLINGS = {
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "m": "m meter metre mtr",
    "km": "km kilometer kilometre",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard",
    "mi": "mi mile",
    "mg": "mg milligram",
    "g": "g gram gm",
    "kg": "kg kilogram kilo",
    "lb": "lb lbs pound",
    "oz": "oz ounce",
    "ton": "ton tonne",
    "ml": "ml milliliter millilitre",
    "l": "l liter litre",
    "gallon": "gallon gal",
    "s": "s sec second",
    "min": "min minute",
    "h": "h hr hour",
    "day": "day",
    "week": "week",
    "month": "month",
    "year": "year yr",
    "dollar": "dollar usd",
    "cent": "cent",
    "euro": "euro eur",
    "km/h": "km/h kmh kph kmph",
    "mph": "mph",
    "m/s": "m/s",
    "%": "percent",
    "degree": "degree deg",
    "radian": "radian rad",
    "celsius": "celsius",
    "fahrenheit": "fahrenheit",
    "acre": "acre",
    "hectare": "hectare ha",
    "ohm": "ohm",
    "n": "newton",
    "j": "joule",
    "w": "watt",
    "v": "volt",
    "am": "am",
    "pm": "pm",
}
_NAMES = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings.split()}
NUMBERS = {
    "degree": r"\pi/180",
    **{"dozen": "12", "hundred": "100", "thousand": "1000"},
    **{"million": "10^{6}", "billion": "10^{9}", "trillion": "10^{12}"},
}
"""Units that are numbers themselves."""
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}


def unit_name(word: str, power: str) -> str:
    """`centimeters`, `sq cm` with power `2` or `square centimetres` -> `cm` or `cm2`; other words stay as they are."""
    words = re.sub(r"\b([ap])\.m\.?", r"\1m", word.lower()).replace(".", " ").split()
    if len(words) > 1 and words[0] in _POWERS:
        power = power or _POWERS[words[0]]
        words = words[1:]
    if len(words) > 1 and words[-1] in ("squared", "cubed"):
        power = power or {"squared": "2", "cubed": "3"}[words[-1]]
        words = words[:-1]
    name = " ".join(words)
    singular = name.removesuffix("s") if len(name) > 2 else name
    known = _NAMES.get(name) or _NAMES.get(singular)
    return (known or singular) + power


def measures(unit: str) -> bool:
    """Whether it is a unit of measure rather than a word for what is counted."""
    return unit.rstrip("-0123456789").split("/")[0] in _SPELLINGS or unit in _SPELLINGS


def exclude(left: str, right: str) -> bool:
    """Whether the same number with these units means different answers; a missing unit excludes nothing."""
    return bool(left and right) and left != right and measures(left) and measures(right)
