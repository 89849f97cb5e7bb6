"""The parts of the reward: exact match and F1 of the answer, and whether the response has the asked form."""

from __future__ import annotations

import re
from typing import Any

from slime_rm_text.f1 import f1
from slime_rm_text.labels import accepted_texts
from slime_rm_text.normalize import comparable

INFORMATION, INFORMATION_END = "<information>", "</information>"
TAG = re.compile(r"<(/?)(think|search|information|answer)>")
FOLLOWS = {
    "": {"think", "search", "answer"},
    "think": {"search", "answer"},
    "search": {"information"},
    "information": {"think", "search", "answer"},
    "answer": set[str](),
}
"""Which block may follow which."""


def parts(response: str, label: Any) -> dict[str, float]:
    """`em`, `f1` and `format`, each from 0 to 1.

    Exact match and F1 are those of SQuAD (Rajpurkar et al. 2016), of the last `<answer>` and the best accepted text;
    without an answer both are 0.

    Args:
        response: the model's and the search's text.
        label: a text, a number, a list of these, any of which is right, or Search-R1's `{"target": [...]}`.

    Raises:
        ValueError: when the label cannot be compared with anything.
    """
    accepted = accepted_texts(label["target"] if isinstance(label, dict) and "target" in label else label)
    answer = last_answer(response)
    if answer is None:
        return {"em": 0.0, "f1": 0.0, "format": 0.0}
    equal = any(ours == theirs for ours, theirs in (comparable(answer, text) for text in accepted))
    return {
        "em": float(equal),
        "f1": max(f1(answer, text) for text in accepted),
        "format": float(has_form(response)),
    }


def last_answer(response: str) -> str | None:
    """The last `<answer>` that the model wrote; None without one. What a search showed does not count."""
    own = without_information(response)
    end = own.rfind("</answer>")
    start = own.rfind("<answer>", 0, end) if end >= 0 else -1
    return own[start + len("<answer>") : end].strip() if start >= 0 else None


def without_information(response: str) -> str:
    """The response without what searches showed, in time linear in it: a regular expression would look for the end of
    every block that is never closed."""
    kept, position = [], 0
    while (start := response.find(INFORMATION, position)) >= 0:
        end = response.find(INFORMATION_END, start)
        if end < 0:
            break
        kept.append(response[position:start])
        position = end + len(INFORMATION_END)
    return " ".join([*kept, response[position:]])


def has_form(response: str) -> bool:
    """Whether it is blocks alone, in order: any number of (think, search, information), then (think, answer).

    The thinking may be left out. Takes time linear in the response.
    """
    last = open_block = ""
    position = 0
    for tag in TAG.finditer(response):
        between, name = response[position : tag.start()], tag[2]
        position = tag.end()
        if tag[1]:
            if open_block != name:
                return False
            last, open_block = name, ""
        elif open_block or between.strip() or name not in FOLLOWS[last]:
            return False
        else:
            open_block = name
    return last == "answer" and not open_block and not response[position:].strip()
