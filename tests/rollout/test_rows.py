"""Prompt files: good rows become samples, bad ones stop the run with file and line or are counted."""

import pytest

from slime_core import DataError
from slime_core.rollout.rows import open_prompt_file


def test_rows_become_samples_with_label_metadata_and_tools(make_args, write_rows):
    messages = [{"role": "user", "content": "hi"}]
    path = write_rows(
        [{"prompt": "a", "label": 3}, {"prompt": messages, "metadata": {"k": 1}, "tools": [{"name": "t"}]}]
    )
    file = open_prompt_file(make_args(), str(path))
    first, second = (file.sample(make_args(), row, "heldout") for row in range(2))
    assert (first.prompt, first.label, first.dataset) == ("a", 3, "heldout")
    assert second.prompt == messages
    assert second.metadata == {"k": 1, "tools": [{"name": "t"}]}


def test_blank_lines_do_not_shift_line_numbers(make_args, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "ü"}\n{"prompt": \n')
    with pytest.raises(DataError, match=r"p\.jsonl, line 4: not valid JSON"):
        open_prompt_file(make_args(), str(path))
    file = open_prompt_file(make_args("--skip-bad-rows"), str(path))
    assert (len(file), file.num_bad_rows) == (2, 1)
    assert file.sample(make_args(), 1).prompt == "ü"


@pytest.mark.parametrize(
    ("row", "words", "message"),
    [
        ({"question": "a"}, [], r"line 1: there is no field 'prompt'; the row has 'question'\. Name .* --input-key"),
        ({"prompt": 5}, [], "'prompt' must be text or a list of chat messages .* it is a number"),
        ({"prompt": []}, [], "it is a list"),
        ({"prompt": "a"}, ["--label-key", "answer"], "there is no field 'answer'; .* --label-key"),
        ({"prompt": "a", "metadata": "x"}, [], "'metadata' must be a JSON object, it is text"),
    ],
)
def test_a_row_that_does_not_fit_says_why(make_args, write_rows, row, words, message):
    with pytest.raises(DataError, match=message):
        open_prompt_file(make_args(*words), str(write_rows([row])))


def test_a_row_that_is_no_object_and_a_file_without_rows(make_args, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("[1]\n")
    with pytest.raises(DataError, match="a row must be a JSON object, this one is a list"):
        open_prompt_file(make_args(), str(path))
    path.write_text("\n")
    with pytest.raises(DataError, match="has no usable row"):
        open_prompt_file(make_args(), str(path))
