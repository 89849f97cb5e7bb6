import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import EngineError, OptionError
from slime_core.testing import CharacterTokenizer, ScriptedEngine, cpu_seconds, make_group, make_options, make_sample
from slime_core.types import Sample, Status, TrainBatch


@given(prompt=st.text(max_size=20), response=st.text(max_size=20))
def test_a_made_sample_has_consistent_arrays(prompt: str, response: str):
    sample = make_sample(response, prompt=prompt)
    assert (sample.prompt_length, sample.response_length) == (len(prompt), len(response))
    assert len(sample.logprobs) == len(sample.weight_versions) == len(response)
    assert CharacterTokenizer().decode(sample.tokens) == prompt + response
    TrainBatch.from_samples([sample]).check()


def test_a_made_sample_is_completed_and_takes_fields():
    sample = make_sample("4", label=4, reward=1.0, metadata={"kind": "sum"})
    assert sample.status is Status.COMPLETED
    assert (sample.response, sample.label, sample.reward, sample.metadata) == ("4", 4, 1.0, {"kind": "sum"})


def test_a_made_sample_takes_a_chat_prompt():
    sample = make_sample("hi", prompt=[{"role": "user", "content": "hello"}])
    assert sample.prompt_length == len("hello")


def test_a_made_sample_round_trips():
    sample = make_sample("4", status=Status.TRUNCATED)
    assert Sample.from_dict(sample.to_dict()).to_dict() == sample.to_dict()


@pytest.mark.parametrize("field", ["tokens", "loss_mask"])
def test_arrays_cannot_be_given(field: str):
    with pytest.raises(TypeError, match=field):
        make_sample("4", **{field: [1]})


def test_a_made_group_shares_its_group_index_and_fails_where_there_is_no_reward():
    group = make_group([1.0, None, 0.0], group_index=2)
    assert [s.group_index for s in group] == [2, 2, 2]
    assert [s.index for s in group] == [6, 7, 8]
    assert [s.reward for s in group] == [1.0, None, 0.0]
    assert [s.status for s in group] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]


def test_options_need_no_model_directory():
    args = make_options("--n-samples-per-prompt", "3", "--seed", "7")
    assert (args.n_samples_per_prompt, args.seed) == (3, 7)


def test_options_include_those_of_a_named_plugin(tmp_path):
    plugin = tmp_path / "bonus.py"
    plugin.write_text(
        "from slime_core import hookimpl\n"
        "@hookimpl\n"
        "def add_options(parser):\n"
        "    parser.add_argument('--bonus-size', type=float, default=0.5)\n"
        "@hookimpl\n"
        "def reward(args, sample):\n"
        "    return args.bonus_size\n"
    )
    assert make_options("--reward", str(plugin), "--bonus-size", "2").bonus_size == 2.0


def test_a_wrong_option_is_refused_as_in_a_run():
    with pytest.raises(OptionError, match="--n-sample"):
        make_options("--n-sample-per-prompt", "3")


async def test_the_scripted_engine_answers_in_order():
    engine = ScriptedEngine(["one", "two"])
    first = await engine.generate([1, 2], {"max_new_tokens": 10})
    second = await engine.generate([1, 2, 3], {"max_new_tokens": 10})
    assert (first.text, second.text) == ("one", "two")
    assert engine.requests == [([1, 2], {"max_new_tokens": 10}), ([1, 2, 3], {"max_new_tokens": 10})]


async def test_a_long_answer_is_cut_and_truncates_the_sample():
    sample = make_sample()
    sample.append_generation(await ScriptedEngine(["abcdef"]).generate([], {"max_new_tokens": 4}))
    assert (sample.response, sample.response_length, sample.status) == ("abcd", 4, Status.TRUNCATED)


async def test_the_scripted_engine_tells_whoever_listens():
    told = []
    generation = await ScriptedEngine(["abcdef"]).generate([], {"max_new_tokens": 4}, on_tokens=told.append)
    assert told == [generation.tokens.tolist()]


async def test_answers_may_depend_on_the_text_so_far():
    engine = ScriptedEngine(lambda text: text.upper())
    generation = await engine.generate(engine.tokenizer.encode("ab"), {})
    assert generation.text == "AB"


async def test_one_request_too_many_says_so():
    with pytest.raises(EngineError, match="0 answers and was asked 1 times"):
        await ScriptedEngine([]).generate([], {})


def test_cpu_seconds_are_those_of_the_quickest_try():
    def seconds(*tries: float) -> float:
        """Of a call whose tries take so long."""
        durations = iter(tries)

        def work():
            until = time.thread_time() + next(durations)
            while time.thread_time() < until:
                pass

        return cpu_seconds(work, len(tries))

    assert seconds(0.2) >= 0.2
    assert 0.05 <= seconds(0.4, 0.05, 0.4) < 0.4


def test_it_imports_without_torch():
    script = "import sys, slime_core.testing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
