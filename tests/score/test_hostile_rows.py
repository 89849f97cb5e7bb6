"""Hostile responses among ordinary ones: the others keep their rewards, and the loop is never held."""

import json

import pytest

from slime_core.cli import main
from slime_core.hostile import hostile_answers

METADATA = {"instruction_id_list": ["punctuation:no_comma", "language:response_language"],
            "kwargs": [{}, {"language": "en"}]}  # fmt: skip
ORDINARY = [
    {"response": r"So the answer is \boxed{B}", "label": "B", "metadata": METADATA},
    {"response": r"So the answer, at last, is \boxed{C}", "label": "B", "metadata": METADATA},
]


@pytest.mark.parametrize(
    ("reward", "flags", "expected"),
    [
        ("f1", ["--f1-from", "boxed"], [1.0, 0.0]),
        ("exact_match", ["--exact-match-from", "boxed"], [1.0, 0.0]),
        ("gpqa", [], [1.0, 0.0]),
        ("ifeval", [], [1.0, 0.0]),
    ],
)
def test_hostile_rows_harm_nothing(reward, flags, expected, tmp_path, capsys):
    rows = []
    for answer in hostile_answers():
        rows += [{"response": rf"\boxed{{{answer}}}", "label": "B", "metadata": METADATA}, *ORDINARY]
    path, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows).replace(r"\ud800", "?"))
    words = [str(path), "--reward", reward, *flags, "--json", "--out", str(out), "--reward-timeout-s", "20"]
    for _ in range(3):  # a busy machine may stop the loop too, but not each time
        assert main(["score", *words]) == 0
        report = json.loads(capsys.readouterr().out)
        if report["longest_stall_s"] < 2.0:
            break
    graded = [json.loads(line)["reward"] for line in out.read_text().splitlines()]
    assert report["failures"] == {}
    assert graded[1::3] == [expected[0]] * len(hostile_answers())
    assert graded[2::3] == [expected[1]] * len(hostile_answers())
    assert report["longest_stall_s"] < 2.0, "the event loop was held"
