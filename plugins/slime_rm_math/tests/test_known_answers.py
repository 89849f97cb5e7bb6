"""Pairs whose verdict is known, a line each: how answers are written, and what must never be taken for equal.

They were written for this package and are under its licence.
"""

import json
from pathlib import Path

import pytest

from slime_rm_math import is_right, same_answer

ROWS = [json.loads(line) for line in (Path(__file__).parent / "known_answers.jsonl").read_text().splitlines()]
ONE_WAY = {("3", "5u+w=3"), ("0", "p^3+q=0"), ("6k+m", "9=6k+m")}
"""An equation stands for its last side as an answer, never as a label."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['answer']} | {row['label']}")
def test_a_known_pair_has_its_verdict_both_ways(row):
    assert same_answer(row["answer"], row["label"]) == row["same"]
    if (row["answer"], row["label"]) not in ONE_WAY:
        assert same_answer(row["label"], row["answer"]) == row["same"]


@pytest.mark.parametrize("row", ROWS[::7], ids=lambda row: f"{row['answer']} | {row['label']}")
def test_dollars_around_a_label_change_nothing(row):
    assert is_right(rf"So it is \boxed{{{row['answer']}}}.", f"${row['label']}$") == row["same"]


@pytest.mark.parametrize(
    ("response", "label", "right"),
    [
        (r"\boxed{1} and \boxed{2}", "1,2", True),
        (r"\boxed{2}, \boxed{1}", "1,2", True),
        (r"\boxed{1} no no no no no \boxed{2}", "1,2", False),
        (r"\boxed{1}. But that is wrong, it is rather \boxed{2}", "1", False),
        (r"first \boxed{3}, so \boxed{4}", "4", True),
        (r"\boxed{\frac{1}{\frac{2}{3}}}", "1.5", True),
        (r"\boxed{The answer is $7$.}", "7", True),
        (r"\boxed{(3,3)} \text{ for part (a) and } \boxed{(1,1)}", "(1,1), (3,3)", True),
    ],
)
def test_several_boxes_and_boxed_sentences(response, label, right):
    assert is_right(response, label) == right


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("We add them. The final answer is $28\\%$. I hope it is correct.", "28"),
        ("Therefore the probability that Alice wins is 2/3.", "\\frac{2}{3}"),
        ("Final Answer: The largest $n$ is 34.", "34"),
        ("Answer: 1,234", "1234"),
        ("So \\[x = 5.\\]", "5"),
    ],
)
def test_an_answer_without_a_box_is_found_only_when_asked_for(response, label):
    assert is_right(response, label, anywhere=True)
    assert not is_right(response, label)
