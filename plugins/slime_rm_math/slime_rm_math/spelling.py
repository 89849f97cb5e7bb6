"""One spelling for what LaTeX, and models, write in many ways."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from slime_rm_math.units import unit_name

# minus signs, products, degrees, spaces, fractions, powers and (full-width) digits that are not ASCII
_CHARACTERS: dict[str, str] = {
    **dict.fromkeys("\u2212\u2013\u2010\u2011\uff0d", "-"),
    **dict.fromkeys("\u00d7\u00b7\u22c5\u2217\u2062", "*"),
    **dict.fromkeys("\u00a0\u2009\u202f\u2002\u2003\t\n", " "),
    **dict.fromkeys("\u201c\u201d\u2018\u2019\u200b\ufeff", ""),
    "\u00f7": "/",
    "\u2044": "/",
    "\u2215": "/",
    "\u2236": ":",
    "\uff1a": ":",
    "\uff0c": ",",
    "\u3001": ",",
    "\uff1b": ";",
    "\uff08": "(",
    "\uff09": ")",
    "\u3002": ".",
    "\u066b": ".",
    "\uff05": "%",
    "\u00b0": r"^\circ ",
    "\u221e": r"\infty ",
    "\u03c0": r"\pi ",
    "\u03b1": r"\alpha ",
    "\u03b2": r"\beta ",
    "\u03b3": r"\gamma ",
    "\u03b8": r"\theta ",
    "\u03bb": r"\lambda ",
    "\u03c6": r"\phi ",
    "\u221a": r"\sqrt ",
    "\u2264": r"\le ",
    "\u2265": r"\ge ",
    "\u2260": r"\ne ",
    "\u2208": r"\in ",
    "\u222a": r"\cup ",
    "\u2229": r"\cap ",
    "\u2205": r"\emptyset ",
    "\u00b1": r"\pm ",
    "\u2248": r"\approx ",
    "\u2220": r"\angle ",
    "\u211d": r"\mathbb{R}",
    "\u2124": r"\mathbb{Z}",
    "\u20ac": r"\text{euro}",
    "\u00a3": r"\text{pound}",
    "\u2032": "'",
    **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
    **{
        sign: f"^{{{digit}}}"
        for digit, sign in enumerate("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")
    },
    **{chr(0x2080 + digit): f"_{{{digit}}}" for digit in range(10)},
    **{
        sign: rf"\frac{{{top}}}{{{bottom}}}"
        for sign, top, bottom in [
            ("\u00bd", 1, 2),
            ("\u2153", 1, 3),
            ("\u2154", 2, 3),
            ("\u00bc", 1, 4),
            ("\u00be", 3, 4),
        ]
    },
}
_TABLE = str.maketrans(_CHARACTERS)
_STYLES = "text(?:bf|it|rm|normal|sf)?|mbox|hbox|math(?:rm|bf|it|sf|normal)|boldsymbol|bm|operatorname"
_TEXT = rf"\\(?:{_STYLES})\*?\s*\{{([^{{}}]*)\}}"
_END = r"(?![a-zA-Z])"
_DEGREES = r"(?<=\d)[\s{}\\,]*\^\\circ\s*(?:\\(?:text|mathrm)\s*\{\s*)?"

_LATEX = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\$\$|\\\[|\\\]|\\\(|\\\)|(?<!\\)\$", ""),
        (
            r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|rm|bf|it|mathstrut|bigl?|Bigl?|quad)(?=\s*\\boxed)",
            "",
        ),
        (rf"\\(?:left|right|middle){_END}\s*\.?(?=$|[^0-9a-zA-Z])", ""),
        (rf"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits|rm|bf|it){_END}|\\!\s*", ""),
        (r"^\s*(?:\*\*|`)(.+?)(?:\*\*|`)\s*$", r"\1"),
        (r"^\s*(?:about|approximately|approx\.?|roughly)\s+", ""),
        (
            r"\\(?:text)?color\s*\{[^{}]*\}|\\(?:underline|uline)(?=\s*\{)|\\(?:blacksquare|square|qed|checkmark)(?![a-zA-Z])",
            "",
        ),
        (r"\\[cdl]?dots[bcmoi]?(?![a-zA-Z])", r"\\ldots "),
        (r"\s*\(\s*([a-z]\s*\\in(?![a-zA-Z])[^()]*)\)\s*$", r", \1"),
        (r"\\+\s*$", ""),
        (r"^\\(?:boxed|fbox)\s*\{(.*)\}$", r"\1"),
        (r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"\\mathbb\s*\{?\s*([A-Z])\s*\}?|\\([RZNQC])(?![a-zA-Z])", r"\\mathbb{\1\2}"),
        (r"\\[pb]?mod\s*\{?\s*(\w+)\s*\}?|\(\s*\\?mod\s*(\w+)\s*\)", r"(mod \1\2)"),
        (r"\s*\{\s*,\s*\}\s*", ","),
        (r"^\s*(\d{1,3})\.(\d{3})\.(\d{3})\s*$", r"\1\2\3"),
        (r"(\d\.\d+)\s*\\ldots\s*$", r"\1"),
        (r"(?<=\d)(?:st|nd|rd|th)(?![a-zA-Z])", ""),
        (r"^\s*(\d+)\s*(?:\\text\s*\{\s*to\s*\}|\bto\b)\s*(\d+)\s*$", r"\1:\2"),
        (r"\\(?:wedge)(?![a-zA-Z])", r"\\land "),
        (r"\\(?:vee)(?![a-zA-Z])", r"\\lor "),
        (r"\\(?:lnot)(?![a-zA-Z])", r"\\neg "),
        (r"\\(?:overline|overrightarrow|overleftrightarrow)\s*\{([A-Z]{2})\}", r"\1"),
        (r"(?<=\d)(?:\s|\\[, ;])+\\Omega\s*$", r"\\text{ ohm}"),
        (r"(?<=\d)(?:\\[, ]|~| )(?=\d{3}(?!\d))", ""),
        (r"(?<=\d)(,\s+)(?=\d{3}(?:,\s*\d{3})+(?!\d))", r"\1"),
        (r"(?<!\\)\\[,;:> ]|~|\\q?quad|\\(?:h|v|nb|thin)space\*?(?:\{[^{}]*\})?|&nbsp;", " "),
        (rf"\\[dtc]frac{_END}", r"\\frac"),
        (rf"\\[dt]binom{_END}", r"\\binom"),
        (r"\\(?:mathrm|operatorname|text|rm|mathbf)\s*\{\s*e\s*\}(?=\s*\^)", "e"),
        (rf"\\(?:cdot|times|ast|bullet){_END}", "*"),
        (rf"\\div{_END}", "/"),
        (rf"\\(?:colon|ratio){_END}", ":"),
        (rf"\\(?:leqslant|leqq|leq|le){_END}|<=|=<", r"\\le "),
        (rf"\\(?:geqslant|geqq|geq|ge){_END}|>=", r"\\ge "),
        (rf"\\(?:neq|ne){_END}|!=|\\not\s*=", r"\\ne "),
        (rf"\\lt{_END}", "<"),
        (rf"\\gt{_END}", ">"),
        (rf"\\(?:lbrace){_END}", r"\\{"),
        (rf"\\(?:rbrace){_END}", r"\\}"),
        (rf"\\(?:lbrack){_END}", "["),
        (rf"\\(?:rbrack){_END}", "]"),
        (rf"\\(?:langle){_END}", "("),
        (rf"\\(?:rangle){_END}", ")"),
        (rf"\\(?:lvert|rvert|vert|mid){_END}", "|"),
        (rf"\\(?:varnothing|empty){_END}", r"\\emptyset"),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ" + _END + r")|\\degrees?" + _END, r"^\\circ "),
        (r"(?<=\d)\s*(?:\\text\s*\{\s*degrees?\s*\}|degrees?\b)", r"^\\circ "),
        (_DEGREES + r"C\}?\s*$", r"\\text{ celsius}"),
        (_DEGREES + r"F\}?\s*$", r"\\text{ fahrenheit}"),
        (r"\\%|(?<=[\d}])\s*(?:\\text\s*\{\s*(?:percent|per cent|pct)\.?\s*\}|(?:per ?cent(?:age)?|pct)\b\.?)", "%"),
        (r"(?<![a-zA-Z\\])(?:\+?infinity|oo)\b", r"\\infty"),
        (r"(\d)\s+(\d+)/(\d+)", r"\1\\frac{\2}{\3}"),
        (r"(?<![a-zA-Z])(?:or|and)\s+(?:or|and)(?![a-zA-Z])", ","),
        (r"(?<=\d)(?:and|or)(?=[A-Z(\\])", ", "),
        (
            r"\\text\s*\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![a-zA-Z])(?<=[\s\d)}\]]),?\s*(?:and|or)(?![a-zA-Z])(?=\s|[\d(\\$])",
            ", ",
        ),
    ]
]
_TIDY = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r",\s+|\s+,\s*", ";"),
        (r"[,;]{2,}", ";"),
        (r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])", "\\1\x00"),
        (r"\s+(?!\d)|(?<!\d)\s+", ""),
        ("\x00", " "),
        (r"\\frac(\d)(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac(\{(?:[^{}]|\{[^{}]*\})*\})(\w)", r"\\frac\1{\2}"),
        (r"\\frac(\w)(?=\{)", r"\\frac{\1}"),
        (r"\\frac ?([a-zA-Z]|\\(?:pi|theta|alpha|beta)) ?(\w)", r"\\frac{\1}{\2}"),
        (r"\\frac(\d)(\\[a-zA-Z]+|[a-zA-Z])", r"\\frac{\1}{\2}"),
        (r"\\sqrt ?(\w)", r"\\sqrt{\1}"),
        (r"\\binom(\w)(\w)", r"\\binom{\1}{\2}"),
        (r"\{\+", "{"),
        (r"\+\s*-", "-"),
    ]
]
_TEXT_MACRO = re.compile(_TEXT)
_UPRIGHT = r"\\(?:text(?:bf|it|rm|normal|sf)?|mbox|hbox|mathrm|operatorname)\s*\{([^{}]*)\}"
_POWER = r"(\^\{?\s*[-\d]+\s*\}?)?"
_TEXT_UNIT = re.compile(
    rf"(?:(?<=[\d}})%\]!])|(?<=\\pi)|(?<=\\pi ))\s*{_UPRIGHT}{_POWER}(?:\s*/\s*{_UPRIGHT}{_POWER})?[\s.]*$"
)
_WORD_UNIT = re.compile(
    r"(?<=[\d%})])\s*(?<![\\a-zA-Z])((?:(?:square|cubic|sq\.?|cu\.?)\s+)?[a-zA-Z]{3,}(?:[ -][a-zA-Z]+){0,3}"
    r"|[cmk]m|kg|ft|mi|lb|oz|ml|yd|hr|km/h|m/s|mph|in\.?|[AaPp]\.?[Mm]\.?)(\^\{?[23]\}?)?[\s.]*$"
)
_LETTER_UNIT = re.compile(r"(?<=\d)\s+([mgsLhN])(\^\{?[23]\}?)?[\s.]*$")
_CURRENCY = re.compile(r"^(-?)\s*(?:\\\$|\\text\s*\{\s*(?:\\?\$|euro|pound|Rs\.?|USD)\s*\}|Rs\.?(?=\s*\d))\s*")
_NOT_UNITS = frozenset(
    {"and", "or", "sqrt", "infty", "sin", "cos", "tan", "log", "mod", "choose", "times", "over", "cis"}
)
_SYMBOLS_OF_UNITS = frozenset("NJWVKFCHTLmgshl")
"""Units that one letter names."""

_OF_ANGLES = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc|cis)(?![a-z])|\\pi")
_SYSTEM = re.compile(r"\\begin\{(cases|aligned|array)\}(?:\{[lcr]*\})?([^&]*)\\end\{\1\}")
_IN_SIGNS = {
    **dict.fromkeys(("all real numbers", "all reals", "real numbers", "all real values"), r"\mathbb{R}"),
    **dict.fromkeys(("empty set", "null set", "no solution", "no solutions", "there is no solution"), r"\emptyset"),
    **dict.fromkeys(("does not exist", "dne"), "DNE"),
}
"""What has a sign, in words."""
_DOUBLED = re.compile(r"\\\\(?=[a-zA-Z])")
_CHOICE = re.compile(r"(?:\\(?:text|textbf|mathrm|mathbf|textrm)\s*\{\s*)?\(?([A-Z])\)?\.?\s*\}?\)?")


class Spelled(NamedTuple):
    """An answer in the common spelling: `7\\text{ cm}` is text `7`, unit `cm`; `words` still has its spaces."""

    text: str
    unit: str
    words: str


@lru_cache(maxsize=4096)
def respell(answer: str) -> Spelled:
    r"""Take away spelling: `\dfrac`, `\left`, `$`, spaces, text macros, units, a final full stop.

    A comma followed by space, which separates and never groups digits, becomes a semicolon.
    """
    text = answer.translate(_TABLE)
    if system := _SYSTEM.fullmatch(text.strip()):
        text = re.sub(r"\\\\|\\cr", ", ", system[2].strip().removesuffix("\\\\"))
    if r"\begin" not in text:  # there two backslashes end a row
        text = _DOUBLED.sub(r"\\", text)
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    if whole := _TEXT_MACRO.fullmatch(text.strip()):
        text = whole[1]
    text, currency = _split_currency(text.strip())
    text, unit = _split_unit(text)
    words = _plain_words(text)
    text = _IN_SIGNS.get(words, text)
    if not _OF_ANGLES.search(text) and text.rstrip().endswith(r"^\circ"):
        text, unit = text.rstrip().removesuffix(r"^\circ"), unit or "degree"
    text = _TEXT_MACRO.sub(r" \1 ", text)
    text = text.strip().rstrip(".:")
    for pattern, replacement in _TIDY:
        text = pattern.sub(replacement, text)
    return Spelled(_unwrap(text), unit or currency, words)


def _split_currency(text: str) -> tuple[str, str]:
    match = _CURRENCY.match(text)
    if match is None:
        text = re.sub(r"(?<=\d)\s*\\\$[\s.]*$", "", text)
        return text.replace(r"\$", ""), ""
    unit = "dollar" if "$" in match[0] or "USD" in match[0] else "euro" if "euro" in match[0] else ""
    return match[1] + text[match.end() :].replace(r"\$", ""), unit


def _split_unit(text: str) -> tuple[str, str]:
    match = _TEXT_UNIT.search(text) or _WORD_UNIT.search(text) or _LETTER_UNIT.search(text)
    if match is None:
        return text, ""
    word = match[1].strip()
    if word.lower() in _NOT_UNITS or (len(word) == 1 and word not in _SYMBOLS_OF_UNITS):
        return text, ""
    if word.split(" ")[0].lower() in ("and", "or"):
        return text, ""
    power = re.sub(r"[^-\d]", "", match[2] or "")
    unit = unit_name(word, power)
    if match.re is _TEXT_UNIT and match[3]:
        unit += f"/{unit_name(match[3], re.sub(r'[^-0-9]', '', match[4] or ''))}"
    return text[: match.start()].rstrip(), unit


def _plain_words(text: str) -> str:
    """The text as prose: macros gone, blanks single, no case, no final punctuation."""
    text = _TEXT_MACRO.sub(r" \1 ", text)
    text = re.sub(r"[{}\"'`*]", "", text)
    text = re.sub(r"\s+", " ", text).strip().rstrip(".!,;:").casefold()
    return re.sub(r"^(?:the|an?) ", "", text)


def _unwrap(text: str) -> str:
    """Drop braces around everything, a plus in front, the parentheses of a choice `(A)`."""
    while text.startswith("{") and text.endswith("}") and _closes_at_end(text):
        text = text[1:-1]
    if len(text) <= 4 and (choice := _CHOICE.fullmatch(text)):
        text = choice[1]
    return text.removeprefix("+")


def _closes_at_end(text: str) -> bool:
    depth = 0
    for position, character in enumerate(text):
        if character in "{}" and text[position - 1 : position] != "\\":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return position == len(text) - 1
    return False
