r"""The part of a response that is graded: what stands behind the thinking, or only a box, a tag, a line of it."""

from __future__ import annotations

import argparse
import re

END_OF_THINKING = "</think>"
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
BRACE = re.compile(r"\\[\\{}]|[{}]")
"""A brace that groups, or an escaped one, which is text."""
ANSWER_LINE = re.compile(r"\banswer\b[*_\s]*(?:is[*_\s]*)?:[*_ \t]*(\S[^\n]*)", re.IGNORECASE)
SOURCES = ("response", "last_line", "answer_line", "boxed", "tag")


def add_source_option(parser: argparse._ArgumentGroup, plugin: str) -> None:
    """The flag `--<plugin>-from`."""
    parser.add_argument(
        f"--{plugin}-from",
        choices=SOURCES,
        default="response",
        help="what is graded: all behind the thinking, its last line, its last 'Answer: ...', the last \\boxed{}, "
        "the last <answer> tag; a response without it earns 0",
    )


def without_thinking(response: str) -> str:
    """What follows the last `</think>`; the whole response when there is none."""
    return response.rpartition(END_OF_THINKING)[2]


def answer_from(response: str, source: str) -> str | None:
    """The part of a response that `--<plugin>-from` names; None when the response has no such part."""
    text = without_thinking(response)
    match source:
        case "response":
            return text
        case "last_line":
            return next((line for line in reversed(text.splitlines()) if line.strip()), None)
        case "answer_line":
            lines = ANSWER_LINE.findall(text)
            return lines[-1].rstrip(" \t*_") if lines else None
        case "boxed":
            box = last_box(text)
            return box[0] if box else None
        case "tag":
            return _last_tag(text)
    raise ValueError(f"there is no part '{source}' of a response")


def last_box(text: str) -> tuple[str, int] | None:
    r"""Content and position of the last \boxed{...} or \fbox{...} whose braces close; None when there is none.

    Takes time linear in the text, whatever it holds.
    """
    end = len(text)
    for start in reversed([box.end() for box in BOX.finditer(text)]):
        depth = 1
        for brace in BRACE.finditer(text, start, end):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                return text[start : brace.start()].strip(), start
        # a box that holds an unclosed one cannot close behind it, so the next search ends here
        end = start
    return None


def _last_tag(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end].strip() if start >= 0 else None
