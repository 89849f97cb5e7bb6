import numpy as np
import pytest

from slime_core import OptionError, Sample, Status
from slime_core.testing import ScriptedEngine, make_options
from slime_search_r1 import SearchR1

SEARCH, ANSWER = "<search>tea</search>", "<answer>kettle</answer>"
INFORMATION = "<information>kettle</information>"


@pytest.fixture
def make_plugin(corpus_file):
    def build(*flags: str) -> SearchR1:
        return SearchR1(make_options("--generate", "search_r1", "--search-r1-corpus", str(corpus_file), *flags))

    return build


async def run(plugin, engine: ScriptedEngine, max_new_tokens: int = 200, sample: Sample | None = None) -> Sample:
    if sample is None:
        sample = Sample(prompt="what?", tokens=np.array(engine.tokenizer.encode("what?"), np.int32))
    params = {"max_new_tokens": max_new_tokens}
    (finished,) = await plugin.generate(engine=engine, sample=sample, sampling_params=params)
    return finished


async def test_a_search_is_answered_and_the_model_goes_on(make_plugin):
    sample = await run(make_plugin(), ScriptedEngine([SEARCH, ANSWER]))
    assert sample.response == SEARCH + INFORMATION + ANSWER
    assert sample.status is Status.COMPLETED


async def test_only_the_models_own_tokens_are_trained_and_have_logprobs(make_plugin):
    sample = await run(make_plugin(), ScriptedEngine([SEARCH, ANSWER]))
    own = [True] * len(SEARCH) + [False] * len(INFORMATION) + [True] * len(ANSWER)
    assert sample.loss_mask.astype(bool).tolist() == own
    assert (~np.isnan(sample.logprobs)).tolist() == own
    assert (sample.weight_versions >= 0).tolist() == own


async def test_the_second_turn_goes_on_from_all_tokens_with_what_is_left_of_the_budget(make_plugin):
    engine = ScriptedEngine([SEARCH, ANSWER])
    await run(make_plugin(), engine)
    tokens, params = engine.requests[1]
    assert engine.tokenizer.decode(tokens) == "what?" + SEARCH + INFORMATION
    assert params["max_new_tokens"] == 200 - len(SEARCH + INFORMATION)
    assert params["no_stop_trim"] is True
    assert set(params["stop"]) == {"</search>", "</answer>"}


async def test_an_answer_without_a_search_ends_the_sample(make_plugin):
    engine = ScriptedEngine([ANSWER])
    assert (await run(make_plugin(), engine)).response == ANSWER
    assert len(engine.requests) == 1


async def test_the_last_turn_may_search_but_is_not_answered(make_plugin):
    sample = await run(make_plugin(), ScriptedEngine([SEARCH, SEARCH]))
    assert sample.response == SEARCH + INFORMATION + SEARCH
    assert sample.status is Status.COMPLETED


async def test_more_turns_allow_more_searches(make_plugin):
    sample = await run(make_plugin("--search-r1-max-turns", "3"), ScriptedEngine([SEARCH, SEARCH, ANSWER]))
    assert sample.response == SEARCH + INFORMATION + SEARCH + INFORMATION + ANSWER


async def test_a_search_that_finds_nothing_says_so(make_plugin):
    sample = await run(make_plugin(), ScriptedEngine(["<search>zebra</search>", ANSWER]))
    assert "<information>nothing found</information>" in sample.response


async def test_information_counts_towards_the_budget(make_plugin):
    budget = len(SEARCH + INFORMATION) + 3
    sample = await run(make_plugin(), ScriptedEngine([SEARCH, ANSWER]), max_new_tokens=budget)
    assert sample.response == SEARCH + INFORMATION + ANSWER[:3]
    assert sample.status is Status.TRUNCATED


async def test_information_that_leaves_no_room_truncates_the_sample(make_plugin):
    engine = ScriptedEngine([SEARCH, ANSWER])
    sample = await run(make_plugin(), engine, max_new_tokens=len(SEARCH + INFORMATION))
    assert (sample.response, sample.status) == (SEARCH, Status.TRUNCATED)
    assert len(engine.requests) == 1


async def test_the_context_bounds_the_response_too(make_plugin):
    engine = ScriptedEngine([ANSWER], context_tokens=len("what?") + 4)
    sample = await run(make_plugin(), engine)
    assert (sample.response, sample.status) == (ANSWER[:4], Status.TRUNCATED)


async def test_an_aborted_sample_goes_on_in_the_turn_it_was_in(make_plugin):
    engine = ScriptedEngine([SEARCH[7:], ANSWER])
    sample = Sample(tokens=np.array(engine.tokenizer.encode("what?"), np.int32), status=Status.ABORTED)
    cut = engine.tokenizer.encode(SEARCH[:7])
    sample.append(cut, text=SEARCH[:7], logprobs=[-1.0] * len(cut), weight_version=0)
    finished = await run(make_plugin(), engine, sample=sample)
    assert finished.response == SEARCH + INFORMATION + ANSWER


async def test_a_sample_aborted_before_its_information_gets_it_first(make_plugin):
    engine = ScriptedEngine([ANSWER])
    sample = Sample(tokens=np.array(engine.tokenizer.encode("what?"), np.int32), status=Status.ABORTED)
    tokens = engine.tokenizer.encode(SEARCH)
    sample.append(tokens, text=SEARCH, logprobs=[-1.0] * len(tokens), weight_version=0)
    finished = await run(make_plugin(), engine, sample=sample)
    assert finished.response == SEARCH + INFORMATION + ANSWER


def test_a_missing_corpus_names_the_flag():
    with pytest.raises(OptionError, match="--search-r1-corpus"):
        SearchR1(make_options("--generate", "search_r1"))


def test_turns_must_be_a_count():
    with pytest.raises(OptionError, match="at least 1"):
        make_options("--generate", "search_r1", "--search-r1-max-turns", "0")
