"""How many GPUs an engine takes, and the commands that start its parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.engines.parallel import Node, Sizes, check_updates, sizes
from slime_core.engines.sglang import command
from slime_core.errors import OptionError
from slime_core.testing import make_options

SMALL = st.integers(1, 4)


def options(*words: str):
    return make_options("--engine", "sglang", *words)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("", Sizes(1, 1, 1)),
        ("--num-gpus-per-engine 8", Sizes(8, 1, 1)),
        ("--num-gpus-per-engine 8 --sglang-pp-size 2", Sizes(4, 2, 1)),
        ("--num-gpus-per-engine 8 --sglang-dp-size 4", Sizes(2, 1, 4)),
        ("--num-gpus-per-engine 8 --sglang-dp-size 4 --sglang-enable-dp-attention", Sizes(8, 1, 1)),
        ("--sglang-tp-size 4 --sglang-ep-size 2", Sizes(4, 1, 1)),
        ("--sglang-tensor-parallel-size 2 --sglang-pipeline-parallel-size 3", Sizes(2, 3, 1)),
    ],
)
def test_sizes_follow_from_the_flags(words, found):
    assert sizes(options(*words.split())) == found


@given(SMALL, SMALL, SMALL)
def test_the_gpus_asked_for_are_the_gpus_used(tensor, pipeline, data):
    asked = str(tensor * pipeline * data)
    words = ["--num-gpus-per-engine", asked, "--sglang-pp-size", str(pipeline), "--sglang-dp-size", str(data)]
    assert sizes(options(*words)) == Sizes(tensor, pipeline, data)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-gpus-per-engine 8 --sglang-tp-size 4", "tensor parallel size 4, .* which are 4 GPUs together"),
        ("--num-gpus-per-engine 6 --sglang-pp-size 4", "which are 4 GPUs together"),
        ("--sglang-tp-size 4 --sglang-ep-size 3", "--sglang-ep-size 3 does not divide the tensor parallel size 4"),
        ("--sglang-tp-size 4 --sglang-dp-size 3 --sglang-enable-dp-attention", "--sglang-dp-size 3 does not divide"),
        ("--sglang-tp-size two", "--sglang-tp-size must be a whole number"),
        ("--sglang-tp-size 8 --num-nodes-per-engine 3", "8 GPUs cannot be spread evenly over --num-nodes-per-engine 3"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(words, message):
    with pytest.raises(OptionError, match=message):
        sizes(options(*words.split()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--sglang-pp-size 2 --weight-transport broadcast", "--weight-transport broadcast does not go .*; use disk"),
        ("--sglang-dp-size 2 --weight-transport tensor", "--weight-transport tensor does not go .*; use disk"),
        ("--sglang-pp-size 2 --max-staleness 1", "--pause-mode retract does not go with --sglang-pp-size 2"),
    ],
)
def test_updates_that_sglang_does_not_take_are_refused(words, message):
    with pytest.raises(OptionError, match=message):
        check_updates(options(*words.split()))


@pytest.mark.parametrize(
    "words",
    [
        "--sglang-pp-size 2",
        "--sglang-pp-size 2 --max-staleness 1 --pause-mode in_place",
        "--sglang-dp-size 2 --max-staleness 1",
        "--sglang-tp-size 2 --sglang-dp-size 2 --sglang-enable-dp-attention --weight-transport broadcast",
    ],
)
def test_updates_that_sglang_takes_are_not(words):
    check_updates(options(*words.split()))


def test_the_tensor_parallel_size_is_passed_on_once():
    assert "--tp-size 4" in " ".join(command(options("--num-gpus-per-engine", "4"), 0, 1))
    given_by_user = command(options("--sglang-tensor-parallel-size", "4"), 0, 1)
    assert given_by_user.count("4") == 1
    assert "--tp-size" not in command(options(), 0, 1)


def test_every_machine_of_an_engine_has_its_rank_and_knows_where_they_meet():
    args = options("--sglang-tp-size", "16", "--num-nodes-per-engine", "2")
    line = " ".join(command(args, 0, 30000, Node("10.0.0.7", 1, 2, "10.0.0.5:20000")))
    assert "--host 10.0.0.7 --port 30000" in line
    assert "--nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.5:20000 --tp-size 16" in line
    assert "--nnodes" not in command(options("--sglang-tp-size", "8"), 0, 30000)


def test_the_first_engines_read_prompts_and_the_others_generate():
    args = options(
        "--num-engines", "3", "--num-prefill-engines", "2", "--sglang-disaggregation-transfer-backend", "nixl"
    )
    lines = [" ".join(command(args, index, 1, bootstrap_port=77)) for index in range(3)]
    for line in lines[:2]:
        assert "--disaggregation-mode prefill --disaggregation-bootstrap-port 77" in line
    assert "--disaggregation-mode decode" in lines[2] and "77" not in lines[2]
    assert all("--disaggregation-transfer-backend nixl" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-prefill-engines 1", "--num-prefill-engines 1 of --num-engines 1 leave none to generate"),
        ("--num-prefill-engines 1 --num-engines 2 --router-policy manual", "--router-policy manual"),
        ("--num-prefill-engines 1 --external-engines http://a:1", "is for engines that the run starts"),
        ("--num-nodes-per-engine 2 --engine embedded", "is for engines that the run starts with --engine sglang"),
    ],
)
def test_layouts_that_cannot_be_are_refused(words, message):
    with pytest.raises(OptionError, match=message):
        options(*words.split())
