"""JSONL and Parquet files: slices, row numbers, rewritten files, what Arrow's types become."""

import datetime
import decimal
import itertools
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_core import DataError
from slime_core.rollout.rows import open_prompt_file

KEEP_FIXTURES = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40
)


@pytest.fixture
def write_parquet(tmp_path):
    def write(rows, name="prompts.parquet", row_group_size=3):
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
        pq.write_table(table, tmp_path / name, row_group_size=row_group_size)
        return tmp_path / name

    return write


def prompts(args, file):
    return [file.sample(args, row).prompt for row in range(len(file))]


# --- JSONL ------------------------------------------------------------------------------------------------------------
def test_blank_lines_do_not_shift_line_numbers(make_args, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "ü"}\n{"prompt": \n')
    with pytest.raises(DataError, match=r"p\.jsonl, line 4: not valid JSON"):
        open_prompt_file(make_args(), str(path))
    file = open_prompt_file(make_args("--skip-bad-rows"), str(path))
    assert (len(file), file.num_bad_rows) == (2, 1)
    assert file.sample(make_args(), 1).prompt == "ü"


@pytest.fixture
def skipping(make_args):
    return make_args("--skip-bad-rows")


@KEEP_FIXTURES
@given(lines=st.lists(st.sampled_from(["good", "bad", "blank"]), min_size=1, max_size=30), newline=st.booleans())
def test_every_row_knows_its_line(skipping, tmp_path, lines, newline):
    numbers = [number for number, kind in enumerate(lines, start=1) if kind == "good"]
    text = {"bad": lambda n: "{", "blank": lambda n: " ", "good": lambda n: json.dumps({"prompt": f"line {n}"})}
    content = "\n".join(text[kind](n) for n, kind in enumerate(lines, start=1))
    path = tmp_path / "p.jsonl"
    path.write_text(content + "\n" * newline)
    if not numbers:
        with pytest.raises(DataError, match="no usable row"):
            open_prompt_file(skipping, str(path))
        return
    file = open_prompt_file(skipping, str(path))
    assert prompts(skipping, file) == [f"line {n}" for n in numbers]
    assert [file.rows.where(row) for row in range(len(file))] == [f"{path}, line {n}" for n in numbers]


BOUNDS = ["", "0", "2", "7", "99", "-1", "-4", "-99"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_slices_are_pythons(make_args, write_rows, write_parquet, kind):
    rows = [{"prompt": str(i)} for i in range(8)]
    path = write_rows(rows) if kind == "jsonl" else write_parquet(rows)
    args = make_args()
    for start, stop in itertools.product(BOUNDS, BOUNDS):
        expected = [str(i) for i in range(8)][slice(int(start) if start else None, int(stop) if stop else None)]
        word = f"{path}@[{start}:{stop}]"
        if expected:
            assert prompts(args, open_prompt_file(args, word)) == expected, word
        else:
            with pytest.raises(DataError, match="has no usable row"):
                open_prompt_file(args, word)


def test_bad_rows_outside_the_slice_do_no_harm(make_args, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": \n')
    assert prompts(make_args(), open_prompt_file(make_args(), f"{path}@[:2]")) == ["a", "b"]
    with pytest.raises(DataError, match="line 3"):
        open_prompt_file(make_args(), f"{path}@[-1:]")


@pytest.mark.parametrize("change", ["shrink", "shift", "delete"])
def test_a_file_rewritten_under_the_run_is_named(make_args, write_rows, change):
    path = write_rows([{"prompt": f"p{i}"} for i in range(5)])
    file = open_prompt_file(make_args(), str(path))
    if change == "delete":
        path.unlink()
    else:
        path.write_text(path.read_text()[:20] if change == "shrink" else "x" + path.read_text())
    with pytest.raises(DataError, match=r"prompts\.jsonl, line 4: the file (changed since|can no longer be read)"):
        file.sample(make_args(), 3)


def test_rows_added_to_a_file_under_the_run_do_no_harm(make_args, write_rows):
    path = write_rows([{"prompt": "a"}, {"prompt": "b"}])
    file = open_prompt_file(make_args(), str(path))
    with path.open("a") as out:
        out.write('{"prompt": "c"}\n')
    assert prompts(make_args(), file) == ["a", "b"]


# --- Parquet ----------------------------------------------------------------------------------------------------------
def test_parquet_rows_are_those_of_jsonl(make_args, write_rows, write_parquet):
    rows = [
        {
            "prompt": [{"role": "user", "content": f"q{i}"}],
            "label": str(i),
            "metadata": {"k": i, "none": None},
            "tools": json.dumps([{"name": "t"}]),
            "unused": "x",
        }
        for i in range(8)
    ]
    args = make_args()
    files = [open_prompt_file(args, str(path)) for path in (write_rows(rows), write_parquet(rows))]
    for row in reversed(range(8)):
        lines, groups = (file.sample(args, row).to_dict() for file in files)
        del lines["metadata"]["none"]
        assert (lines.pop("origin")[-6:], groups.pop("origin")[-5:]) == (f"line {row + 1}", f"row {row}")
        assert groups == lines


def test_a_bad_parquet_row_is_named_or_counted(make_args, write_parquet):
    path = write_parquet([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}, {"prompt": "d"}, {"prompt": ""}])
    with pytest.raises(DataError, match=r"prompts\.parquet, row 4: 'prompt' is empty"):
        open_prompt_file(make_args(), str(path))
    args = make_args("--skip-bad-rows")
    path = write_parquet([{"prompt": "a"}, {"prompt": None}, {"prompt": "c"}, {"prompt": ""}, {"prompt": "e"}])
    file = open_prompt_file(args, str(path))
    assert (prompts(args, file), file.num_bad_rows) == (["a", "c", "e"], 2)
    assert file.rows.where(2) == f"{path}, row 4"


def test_objects_lose_the_null_fields_that_arrow_fills_in(make_args, write_parquet):
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"name": "f"}]},
    ]
    file = open_prompt_file(make_args(), str(write_parquet([{"prompt": messages}])))
    assert file.sample(make_args(), 0).prompt == messages


def test_dates_and_decimals_become_text_that_a_checkpoint_can_hold(make_args, write_parquet):
    rows = [{"prompt": "a", "label": decimal.Decimal("1.50"), "metadata": {"day": datetime.date(2024, 5, 1)}}]
    sample = open_prompt_file(make_args(), str(write_parquet(rows))).sample(make_args(), 0)
    assert (sample.label, sample.metadata) == ("1.50", {"day": "2024-05-01"})


def test_a_missing_column_is_named_with_those_there_are(make_args, write_parquet):
    path = write_parquet([{"question": "a", "answer": "b"}])
    with pytest.raises(DataError, match=r"no column 'prompt', only 'question', 'answer'\. Name .* --input-key"):
        open_prompt_file(make_args("--skip-bad-rows"), str(path))


def test_what_is_no_parquet_file_is_refused(make_args, tmp_path):
    path = tmp_path / "p.parquet"
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(DataError, match=r"p\.parquet is not a Parquet file"):
        open_prompt_file(make_args(), str(path))
