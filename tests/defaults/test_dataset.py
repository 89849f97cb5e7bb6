"""Drawing prompts: epochs, shares by weight, and states that a resumed run goes on from."""

import json
from collections import Counter
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_core import DataError
from slime_core.defaults.dataset import Dataset
from slime_core.testing import make_options

KEEP_FIXTURES = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=20
)


@pytest.fixture
def write(tmp_path):
    """`write("a.jsonl", 5)` -> a file of prompts a0 ... a4."""

    def write(name, num_rows):
        path = tmp_path / name
        prompts = [f"{path.stem}{i}" for i in range(num_rows)]
        if path.suffix == ".parquet":
            pq.write_table(pa.table({"prompt": prompts}), path, row_group_size=4)
        else:
            path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        return path

    return write


def options(*words):
    return make_options(*map(str, words))


def draw(dataset, state, count):
    return [sample.prompt for sample in dataset.get_samples(state=state, num_prompts=count)]


# --- epochs -----------------------------------------------------------------------------------------------------------
def test_a_data_set_smaller_than_a_batch_wraps_as_often_as_needed(write, caplog):
    state = {}
    drawn = draw(Dataset(options("--prompt-data", write("a.jsonl", 3))), state, 32)
    assert "--prompt-data has 3 rows, fewer than --rollout-batch-size" in caplog.text
    epochs = [drawn[i : i + 3] for i in range(0, 30, 3)]
    assert all(sorted(epoch) == ["a0", "a1", "a2"] for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1
    assert (state["epoch"], state["position"], state["num_rows"]) == (10, 2, 3)


def test_files_without_weights_are_one_set_whose_epoch_has_every_row_once(write):
    words = ["--prompt-data", write("a.jsonl", 7), f"{write('b.parquet', 9)}@[2:]", write("c.jsonl", 1)]
    rows = [f"a{i}" for i in range(7)] + [f"b{i}" for i in range(2, 9)] + ["c0"]
    state = {}
    dataset = Dataset(options(*words))
    first, second = draw(dataset, state, 15), draw(dataset, state, 15)
    assert sorted(first) == sorted(second) == sorted(rows)
    assert first != second
    assert (state["epoch"], state["position"]) == (2, 0)
    assert draw(Dataset(options("--no-shuffle", *words)), {}, 15) == rows


def test_without_files_samples_are_blank_and_nothing_is_counted():
    state = {}
    assert draw(Dataset(options()), state, 3) == ["", "", ""]
    assert state == {}


# --- shares -----------------------------------------------------------------------------------------------------------
@KEEP_FIXTURES
@given(weights=st.lists(st.sampled_from(["", "=0.1", "=0.5", "=1", "=3", "=7.3"]), min_size=2, max_size=5))
def test_every_file_gives_its_share_and_goes_through_its_rows_evenly(write, weights):
    names = "abcde"[: len(weights)]
    words = [f"{write(f'{name}.jsonl', 2 + i)}{w}" for i, (name, w) in enumerate(zip(names, weights, strict=True))]
    if not any(weights):
        words[0] += "=1"
    values = [float(w[1:] or 1) for w in weights]
    drawn = draw(Dataset(options("--prompt-data", *words)), {}, 300)
    for end in range(1, 301):
        counts = Counter(prompt[0] for prompt in islice(drawn, end))
        for name, value in zip(names, values, strict=True):
            assert abs(counts[name] - end * value / sum(values)) <= 1 + len(names) / 2
    for i, name in enumerate(names):
        mine = [prompt for prompt in drawn if prompt[0] == name]
        for begin in range(0, len(mine) - (2 + i) + 1, 2 + i):
            assert len(set(mine[begin : begin + 2 + i])) == 2 + i


def test_an_epoch_of_weighted_files_is_as_many_prompts_as_they_have_rows(write):
    state = {}
    dataset = Dataset(options("--prompt-data", f"{write('a.jsonl', 6)}=3", f"{write('b.jsonl', 4)}=1"))
    draw(dataset, state, 25)
    assert (state["epoch"], state["position"], state["num_rows"]) == (2, 5, 10)


# --- resume -----------------------------------------------------------------------------------------------------------
@KEEP_FIXTURES
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    weighted=st.booleans(),
    shuffle=st.booleans(),
)
def test_draws_of_any_sizes_with_saved_states_between_give_what_one_draw_gives(write, counts, weighted, shuffle):
    words = ["--prompt-data", f"{write('a.jsonl', 5)}@[1:]", write("b.parquet", 11), write("c.jsonl", 3)]
    if weighted:
        words[1:] = [f"{words[1]}=2.5", f"{words[2]}=0.3", words[3]]
    args = options("--shuffle" if shuffle else "--no-shuffle", *words)
    unbroken = draw(Dataset(args), {}, sum(counts))
    state, resumed = {}, []
    for count in counts:
        resumed += draw(Dataset(args), state, count)
        state = json.loads(json.dumps(state))
    assert resumed == unbroken


def saved_state(args):
    state = {}
    draw(Dataset(args), state, 4)
    return json.loads(json.dumps(state))


def test_a_file_that_only_moved_is_the_same_data(write, tmp_path):
    path = write("a.jsonl", 9)
    args = options("--prompt-data", path)
    state = saved_state(args)
    unbroken = draw(Dataset(args), saved_state(args), 20)
    path.rename(tmp_path / "moved.jsonl")
    assert draw(Dataset(options("--prompt-data", tmp_path / "moved.jsonl")), state, 20) == unbroken


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_file_that_changed_since_the_checkpoint_is_named(write, name):
    path = write(name, 9)
    state = saved_state(options("--prompt-data", path))
    write(name, 5)
    with pytest.raises(DataError, match=rf"{name} has 5 usable rows, at the checkpoint it had 9\. Give the run"):
        draw(Dataset(options("--prompt-data", path)), state, 1)
    write(f"b{name[1:]}", 9).rename(path)
    with pytest.raises(DataError, match=rf"the rows of .*{name} are not those it had at the checkpoint"):
        draw(Dataset(options("--prompt-data", path)), state, 1)


def test_what_else_changes_the_order_is_named(write):
    path = write("a.jsonl", 9)
    state = saved_state(options("--prompt-data", path))
    for words, message in [
        ((path, path), "--prompt-data names 2 files, at the checkpoint it was 1"),
        ((path, "--seed", 5), "depends on seed, which was 1234 and now is 5"),
        ((path, "--no-shuffle"), "depends on shuffle, which was True and now is False"),
        ((f"{path}=2",), r"depends on weights, which was \[\] and now is \[2.0\]"),
    ]:
        with pytest.raises(DataError, match=message):
            draw(Dataset(options("--prompt-data", *words)), state, 1)
    with pytest.raises(DataError, match="names 0 files, at the checkpoint it was 1"):
        draw(Dataset(options()), state, 1)
    with pytest.raises(DataError, match="is not that of --get-samples dataset"):
        draw(Dataset(options("--prompt-data", path)), {"cursor": 3}, 1)
