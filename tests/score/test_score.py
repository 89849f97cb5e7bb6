"""`slime score`: rows graded as in training, and what it says about them."""

import json

import pytest

from slime_core.cli import main

LAST_WORD = """
from slime_core import hookimpl

@hookimpl
def add_options(parser):
    parser.add_argument("--last-word-bonus", type=float, default=0.0, help="added")

@hookimpl
def reward(args, sample):
    if sample.label is None:
        raise ValueError("no label")
    right = sample.response.split()[-1:] == [str(sample.label)]
    return {"reward": right + args.last_word_bonus, "length": sample.response_length}
"""
GROUP = """
from slime_core import hookimpl

@hookimpl
def group_reward(samples):
    return [float(len(samples))] * len(samples)
"""


@pytest.fixture
def score(tmp_path, monkeypatch, capsys):
    """`score(rows, words...)` -> exit code and output."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "last_word.py").write_text(LAST_WORD)
    (tmp_path / "size.py").write_text(GROUP)

    def run(rows, *words, file="rows.jsonl"):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / file).write_text("\n".join(lines) + "\n")
        code = main(["score", *words])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def as_json(score, rows, *words):
    code, out = score(rows, "rows.jsonl", "--reward", "./last_word.py", "--json", *words)
    return code, json.loads(out)


ROWS = [
    {"prompt": "2+2?", "response": "it is 4", "label": 4, "given": 1},
    {"response": ["5", "4"], "label": "4", "given": [0, 0]},
    {"response": "4", "label": None, "given": 1},
]


def test_samples_are_graded_failed_ones_counted_with_reason_and_line(score):
    code, report = as_json(score, ROWS)
    assert code == 0
    assert (report["rows"], report["samples"], report["graded"]) == (3, 4, 3)
    assert report["rewards"]["last_word"]["mean"] == pytest.approx(2 / 3)
    assert report["rewards"]["last_word/length"]["max"] == 3
    assert report["failures"] == {"reward 'last_word' ValueError: no label": {"count": 1, "rows": [3]}}


def test_disagreements_with_a_column_are_shown(score):
    _, report = as_json(score, ROWS, "--compare", "given")
    assert (report["compared"], report["disagreements"]) == (3, 1)
    assert report["shown_disagreements"][0] | {"response": ""} == {
        "row": 2, "given": 0.0, "reward": 1.0, "label": "'4'", "response": ""
    }  # fmt: skip


def test_a_tolerance_forgives_small_differences(score):
    _, report = as_json(score, ROWS, "--compare", "given", "--tolerance", "1")
    assert report["disagreements"] == 0


def test_the_column_may_stand_in_the_metadata(score):
    rows = [{"response": "4", "label": 4, "metadata": {"given": 0.0}}]
    assert as_json(score, rows, "--compare", "given")[1]["disagreements"] == 1


@pytest.mark.parametrize(
    "words",
    [
        ["rows.jsonl", "--reward", "./last_word.py"],
        ["--reward", "./last_word.py", "rows.jsonl"],
        ["--show", "3", "--reward", "./last_word.py", "rows.jsonl", "--last-word-bonus", "1"],
        ["--out", "out.jsonl", "--reward", "./last_word.py", "rows.jsonl"],
        ["--json", "rows.jsonl", "--reward=./last_word.py"],
    ],
)
def test_the_file_may_stand_anywhere(score, words):
    assert score(ROWS, *words)[0] == 0


def test_plugin_flags_and_weights_count(score):
    words = ["rows.jsonl", "--reward", "./last_word.py=2", "./size.py", "--last-word-bonus", "0.5", "--json"]
    _, out = score([{"response": ["4", "5"], "label": 4}], *words)
    rewards = json.loads(out)["rewards"]
    assert rewards["(weighted sum)"]["min"] == 2 * 0.5 + 2
    assert rewards["(weighted sum)"]["max"] == 2 * 1.5 + 2


def test_the_table_names_rewards_failures_and_speed(score):
    code, out = score(ROWS, "rows.jsonl", "--reward", "./last_word.py", "--compare", "given")
    assert code == 0
    assert "rows.jsonl: 4 samples in 3 rows" in out
    assert "1 of 4 samples have no reward (FAILED):" in out
    assert "1 x reward 'last_word' ValueError: no label  (line 3)" in out
    assert "66.67 % agree with 'given' (1 of 3 do not)" in out
    assert "line 2: given 0, here 1" in out
    assert "samples a second, 2 reward workers; the event loop was held for " in out


def test_every_sample_is_written_in_order(score, tmp_path):
    score(ROWS * 100, "rows.jsonl", "--reward", "./last_word.py", "--out", "out.jsonl")
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["row"] for row in written] == [n for n in range(1, 301) for _ in range(2 if n % 3 == 2 else 1)]
    assert written[0]["reward"] == 1.0
    assert written[3]["failure"] == "reward 'last_word' ValueError: no label"


def test_a_hanging_grader_fails_alone(score, tmp_path):
    (tmp_path / "hang.py").write_text(
        "from slime_core import hookimpl\n@hookimpl\ndef reward(sample):\n"
        "    while sample.response == 'hang': pass\n    return 1.0\n"
    )
    rows = [{"response": text} for text in ("a", "hang", "b", "c")]
    for _ in range(3):  # a busy machine may stop the loop too, but not each time
        _, out = score(rows, "rows.jsonl", "--reward", "./hang.py", "--reward-timeout-s", "3", "--json")
        report = json.loads(out)
        if report["longest_stall_s"] < 2.0:
            break
    assert report["graded"] == 3
    assert [failure["rows"] for failure in report["failures"].values()] == [[2]]
    assert report["longest_stall_s"] < 2.0, "the event loop waited for a grader"


def test_a_reward_that_asks_an_engine_fails_and_says_so(score, tmp_path):
    (tmp_path / "asks.py").write_text(
        "from slime_core import hookimpl\n@hookimpl\nasync def reward(engine):\n    return engine.tokenizer\n"
    )
    code, out = score([{"response": "4"}], "rows.jsonl", "--reward", "./asks.py")
    assert code == 1
    assert "this reward asks an engine, which is there in training only" in out


def test_the_limit_bounds_the_rows(score):
    assert as_json(score, ROWS, "--limit", "1")[1]["samples"] == 1


def test_fields_can_be_named(score):
    rows = [{"out": "4", "gold": "4"}]
    _, report = as_json(score, rows, "--response-key", "out", "--label-key", "gold")
    assert report["rewards"]["last_word"]["mean"] == 1.0


@pytest.mark.parametrize(
    ("row", "words", "message"),
    [
        ('{"response"', [], "line 1: not valid JSON"),
        ("[1]", [], "line 1: a row must be a JSON object"),
        ({"answer": "4"}, [], "no field 'response'; the row has 'answer'"),
        ({"response": 4}, [], "'response' must be a text or a list of texts"),
        ({"response": "4", "metadata": 3}, [], "'metadata' must be a JSON object"),
        ({"response": "4"}, ["--label-key", "gold"], "no field 'gold', which --label-key names"),
        ({"response": "4", "given": "high"}, ["--compare", "given"], "must hold a number for each of 1 responses"),
        ({"response": ["4", "5"], "given": [1]}, ["--compare", "given"], "for each of 2 responses"),
    ],
)
def test_a_bad_row_is_named_with_its_line_or_counted(score, row, words, message):
    code, out = score([row], "rows.jsonl", "--reward", "./last_word.py", *words)
    assert code == 1
    assert message in out
    good = {"response": "4", "label": "4", "gold": "4", "given": 1}
    _, report = as_json(score, [row, good], "--skip-bad-rows", *words)
    assert (report["bad_rows"], report["samples"]) == (1, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--reward", "./last_word.py"], "name the file of rows"),
        (["none.jsonl", "--reward", "./last_word.py"], "there is no file none.jsonl"),
        (["rows.jsonl"], "name at least one reward"),
        (["rows.jsonl", "--reward", "no_such"], "no plugin named 'no_such'"),
        (["rows.jsonl", "--reward", "./last_word.py", "--last-word-bonsu", "1"], "did you mean --last-word-bonus"),
        (["rows.jsonl", "--reward", "./last_word.py", "--limit", "0"], "not a whole number of at least 1"),
    ],
)
def test_a_wrong_command_line_gets_one_sentence(score, words, message):
    code, out = score(ROWS, *words)
    assert (code, "Traceback" in out) == (1, False)
    assert message in out
