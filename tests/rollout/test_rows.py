"""What a row must hold: good rows become samples, bad ones stop the run with file and line or are counted."""

import json

import pytest

from slime_core import DataError
from slime_core.rollout.rows import count_prompts, open_prompt_file


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


def test_metadata_and_tools_written_as_text_are_parsed(make_args, write_rows):
    path = write_rows([{"prompt": "a", "metadata": json.dumps({"k": [1]}), "tools": json.dumps([{"name": "t"}])}])
    sample = open_prompt_file(make_args(), str(path)).sample(make_args(), 0)
    assert sample.metadata == {"k": [1], "tools": [{"name": "t"}]}


def test_whole_numbers_beyond_64_bits_keep_their_digits_as_text(make_args, write_rows):
    numbers = [2**70, -(2**70), 2**64 - 1, -(2**63)]
    path = write_rows([{"prompt": "a", "label": number, "metadata": {"n": [number]}} for number in numbers])
    file = open_prompt_file(make_args(), str(path))
    samples = [file.sample(make_args(), row) for row in range(len(file))]
    expected = [str(2**70), str(-(2**70)), 2**64 - 1, -(2**63)]
    assert [sample.label for sample in samples] == expected
    assert [sample.metadata["n"] for sample in samples] == [[label] for label in expected]


def test_a_row_brings_its_own_sampling_parameters(make_args, write_rows):
    args = make_args("--sampling-params-key", "how")
    path = write_rows([{"prompt": "a", "how": {"temperature": 0, "stop": ["x"], "max_new_tokens": 5}}])
    assert open_prompt_file(args, str(path)).sample(args, 0).sampling_params == {
        "temperature": 0,
        "stop": ["x"],
        "max_new_tokens": 5,
    }


def test_a_key_with_dots_looks_inside_objects_unless_a_field_has_that_very_name(make_args, write_rows):
    args = make_args("--label-key", "reward_model.truth")
    path = write_rows(
        [{"prompt": "a", "reward_model": {"truth": "4"}}, {"prompt": "b", "reward_model.truth": "5", "reward_model": 1}]
    )
    file = open_prompt_file(args, str(path))
    assert [file.sample(args, row).label for row in range(2)] == ["4", "5"]


def test_an_assistant_message_may_hold_tool_calls_alone(make_args, write_rows):
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "w", "arguments": "{}"}}]},
        {"role": "tool", "content": "rain"},
    ]
    file = open_prompt_file(make_args(), str(write_rows([{"prompt": messages}])))
    assert file.sample(make_args(), 0).prompt == messages


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("row", "words", "message"),
    [
        ({"question": "a"}, [], r"line 1: there is no field 'prompt'; the row has 'question'\. Name .* --input-key"),
        ({"prompt": 5}, [], "'prompt' must be text or a list of chat messages .* it is a number"),
        ({"prompt": []}, [], "it is an empty list"),
        ({"prompt": ""}, [], "'prompt' is empty"),
        ({"prompt": [USER, {"role": "user"}]}, [], "message 1 of 'prompt' needs .* 'content'; it is missing"),
        ({"prompt": [{"role": "assistant", "content": None}]}, [], "message 0 of 'prompt' needs"),
        ({"prompt": [{"role": "user", "content": 3}]}, [], "'content'; it is a number"),
        ({"prompt": [{"role": "user", "content": ["hi"]}]}, [], "'content'; it is a list"),
        ({"prompt": [{"content": "hi"}]}, [], "message 0 of 'prompt' has no 'role'"),
        ({"prompt": [{"role": "user", "content": ""}]}, [], "every message of 'prompt' is empty"),
        ({"prompt": "a"}, ["--label-key", "answer"], "there is no field 'answer'; .* --label-key"),
        ({"prompt": "a", "metadata": "x"}, [], "'metadata' is text but not valid JSON .* --metadata-key"),
        ({"prompt": "a", "metadata": [1]}, [], "'metadata' must be a JSON object, .* it is a list"),
        ({"prompt": "a", "metadata": "[1]"}, [], "'metadata' must be a JSON object, .* it is a list"),
        ({"prompt": "a", "tools": {"name": "t"}}, [], "'tools' must be a list of objects.* --tool-key"),
        ({"prompt": "a", "sampling_params": {"top_p": 0}}, [], "'top_p' in 'sampling_params' must be .* it is 0"),
        ({"prompt": "a", "sampling_params": {"max_new_tokens": True}}, [], "'max_new_tokens' .* it is True"),
        ({"prompt": "a", "sampling_params": {"n": 4}}, [], "'n' .*--n-samples-per-prompt"),
    ],
)
def test_a_row_that_does_not_fit_says_why(make_args, write_rows, row, words, message):
    path = write_rows([row])
    with pytest.raises(DataError, match=message):
        open_prompt_file(make_args(*words), str(path))


def test_bad_rows_are_counted_if_asked_and_the_log_shows_the_first(make_args, write_rows, caplog):
    args = make_args("--skip-bad-rows")
    path = write_rows([{"prompt": "a"}, {"prompt": ""}, {"prompt": "b"}, {"no": 1}])
    file = open_prompt_file(args, str(path))
    assert (len(file), file.num_bad_rows) == (2, 2)
    assert [file.sample(args, row).prompt for row in range(2)] == ["a", "b"]
    assert "left out 2 bad rows" in caplog.text
    assert "line 2: 'prompt' is empty" in caplog.text


def test_a_row_that_is_no_object_and_a_file_without_rows(make_args, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("[1]\n")
    with pytest.raises(DataError, match="a row must be a JSON object, this one is a list"):
        open_prompt_file(make_args(), str(path))
    path.write_text("\n")
    with pytest.raises(DataError, match="has no usable row"):
        open_prompt_file(make_args(), str(path))


def test_the_rows_of_an_epoch_are_counted_over_files_and_slices(make_args, write_rows):
    one = write_rows([{"prompt": str(i)} for i in range(5)], "one.jsonl")
    two = write_rows([{"prompt": "a"}, {"prompt": ""}, {"prompt": "b"}], "two.jsonl")
    assert count_prompts(make_args()) == 0
    assert count_prompts(make_args("--prompt-data", f"{one}@[1:-1]", one)) == 8
    assert count_prompts(make_args("--skip-bad-rows", "--prompt-data", one, two)) == 7
