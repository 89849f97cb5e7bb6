"""Turns of a model and its environment: exact to the token, whatever interrupts them."""

import asyncio
import zlib
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from served import served
from slime_core import (
    DataError,
    Generation,
    OptionError,
    PluginError,
    Sample,
    Status,
    call_tools,
    split_turns,
    take_turns,
    turns_of,
)
from slime_core.engines.client import EngineClient, SampleEngine
from slime_core.engines.requests import Requests
from slime_core.testing import CharacterTokenizer, ScriptedEngine

PROMPT = "?"
STOP = "ab;"


def prompt() -> Sample:
    return Sample(prompt=PROMPT, tokens=np.array([ord(c) for c in PROMPT], np.int32))


async def run(engine, reply, sample=None, *, budget=200, max_turns=4, stop=("!",), **limits: Any) -> Sample:
    return await take_turns(
        engine, sample or prompt(), {"max_new_tokens": budget}, reply, max_turns=max_turns, stop=stop, **limits
    )


async def shout(turn) -> str | None:
    return f"[{turn.text.upper()}]" if turn.text.endswith("!") else None


# --- exactness under interruptions ------------------------------------------------------------------------------------
def next_character(seed: int, text: str) -> str:
    """What the model of these tests writes behind a text: often pieces of the stop string, sometimes its end token."""
    likely = {"a": "bbbx", "b": ";;;y"}.get(text[-1], "aaaaxyz;.")
    return likely[zlib.crc32(f"{seed} {text}".encode()) % len(likely)]


def logprob(text: str) -> float:
    """The log-probability of the last character of a text."""
    return -float(zlib.crc32(text.encode()) % 1000) / 100


def tool(turn_text: str) -> str | None:
    """What the environment says; None ends the sample."""
    number = zlib.crc32(turn_text.encode())
    return None if number % 5 == 0 else f"<{number % 10 ** (number % 4)}{STOP * (number % 2)}>"


def expected(seed: int, budget: int, max_turns: int, cap: int) -> tuple[str, list[int], list[float], list[int]]:
    """Response, mask, log-probabilities and turn ends of an unbroken conversation, made one character at a time."""
    text, mask, logprobs, ends = "", [], [], []
    for turn_number in range(max_turns):
        turn = ""
        while len(text) < budget and len(turn) < cap and STOP not in turn and not turn.endswith("."):
            turn += next_character(seed, PROMPT + text)
            text += turn[-1]
            mask.append(1)
            logprobs.append(logprob(PROMPT + text))
        ends.append(len(text))
        said = None if turn_number == max_turns - 1 else tool(turn)
        if said is None or len(said) >= budget - len(text):
            break
        text, mask, logprobs = text + said, mask + [0] * len(said), logprobs + [np.nan] * len(said)
    return text, mask, logprobs, ends


class InterruptedEngine:
    """Looks for stop strings in what one request made, as engines do, and is interrupted after `lives` characters."""

    tokenizer = CharacterTokenizer()
    context_tokens = 10_000

    def __init__(self, seed: int, lives: int, version: int) -> None:
        self.seed, self.lives, self.version = seed, lives, version
        self.emitted: dict[int, int] = {}
        """Where in the context each token was put; the last to be put there counts."""
        self.num_emitted = 0
        self.stopped = asyncio.Event()

    async def until_stopped(self) -> None:
        await self.stopped.wait()

    async def generate(self, tokens, sampling_params, **request) -> Generation:
        text, made, finish = self.tokenizer.decode(tokens), "", "length"
        while len(made) < sampling_params["max_new_tokens"]:
            if self.num_emitted == self.lives:
                finish = "abort"
                break
            made += next_character(self.seed, text + made)
            self.emitted[len(text) + len(made) - 1] = ord(made[-1])
            self.num_emitted += 1
            if made.endswith(".") or any(stop in made for stop in sampling_params["stop"]):
                finish = "stop"
                break
        return Generation(
            tokens=np.array(self.tokenizer.encode(made), np.int32),
            text=made,
            logprobs=np.array([logprob(text + made[: n + 1]) for n in range(len(made))], np.float32),
            weight_versions=np.full(len(made), self.version, np.int32),
            finish_reason=finish,
        )


@settings(max_examples=300)
@given(
    seed=st.integers(0, 10**6),
    lives=st.lists(st.integers(0, 12), max_size=30),
    stuck_tools=st.sets(st.integers(0, 10)),
    budget=st.integers(1, 80),
    max_turns=st.integers(1, 6),
    cap=st.integers(1, 30),
)
def test_an_interrupted_conversation_equals_an_unbroken_one(seed, lives, stuck_tools, budget, max_turns, cap):
    async def converse() -> tuple[Sample, list[InterruptedEngine]]:
        sample, engines, calls = prompt(), [], 0
        while sample.status in (Status.PENDING, Status.ABORTED):
            number = len(engines)
            engines.append(InterruptedEngine(seed, lives[number] if number < len(lives) else -1, number))

            async def reply(turn) -> str | None:
                nonlocal calls
                calls += 1
                if calls in stuck_tools:
                    engines[-1].stopped.set()
                    await asyncio.Event().wait()
                return tool(turn.text)

            sample = await run(
                engines[-1], reply, Sample.from_dict(sample.to_dict()),
                budget=budget, max_turns=max_turns, stop=[STOP], max_turn_tokens=cap,
            )  # fmt: skip
        return sample, engines

    sample, engines = asyncio.run(converse())
    text, mask, logprobs, ends = expected(seed, budget, max_turns, cap)
    assert sample.response == text
    assert CharacterTokenizer().decode(sample.tokens) == PROMPT + text
    assert sample.loss_mask.tolist() == mask
    np.testing.assert_array_equal(sample.logprobs, np.array(logprobs, np.float32))
    assert sample.turn_ends == ends
    for version, engine in enumerate(engines):
        for position in np.flatnonzero(sample.weight_versions == version) + sample.prompt_length:
            assert sample.tokens[position] == engine.emitted[position]


async def test_what_a_request_wrote_behind_a_stop_string_begun_by_an_aborted_one_is_cut():
    sample = prompt()
    sample.append([ord("x"), ord("a")], text="xa", logprobs=[-1.0, -1.0], weight_version=0)
    sample.status = Status.ABORTED
    sample = await run(ScriptedEngine(["b;yyy", "."]), shout_at_stop, sample, stop=[STOP])
    assert sample.response == "xab;<seen>."
    assert sample.logprobs.tolist()[:4] == [-1.0] * 4


async def test_a_turn_that_was_aborted_at_the_end_of_its_stop_string_is_over():
    sample = prompt()
    sample.append([ord(c) for c in STOP], text=STOP, logprobs=[-1.0] * 3, weight_version=0)
    sample.status = Status.ABORTED
    engine = ScriptedEngine(["."])
    sample = await run(engine, shout_at_stop, sample, stop=[STOP])
    assert (sample.response, sample.turn_ends, len(engine.requests)) == (f"{STOP}<seen>.", [3, 10], 1)


async def shout_at_stop(turn) -> str | None:
    return "<seen>" if turn.text.endswith(STOP) else None


# --- budgets and ends -------------------------------------------------------------------------------------------------
async def test_model_and_environment_take_turns():
    engine = ScriptedEngine(["one!", "two!", "end"])
    sample = await run(engine, shout)
    assert (sample.response, sample.status) == ("one![ONE!]two![TWO!]end", Status.COMPLETED)
    assert sample.turn_ends == [4, 14, 23]
    assert sample.metadata["round_number"] == 3
    assert [params["max_new_tokens"] for _, params in engine.requests] == [200, 190, 180]
    assert engine.requests[0][1]["stop"] == ["!"]


async def test_the_last_turn_gets_no_reply():
    sample = await run(ScriptedEngine(["one!", "two!"]), shout, max_turns=2)
    assert (sample.response, sample.status) == ("one![ONE!]two!", Status.COMPLETED)


async def test_a_reply_that_leaves_no_room_truncates_the_sample_and_is_not_appended():
    sample = await run(ScriptedEngine(["one!"]), shout, budget=10)
    assert (sample.response, sample.status) == ("one!", Status.TRUNCATED)


async def test_an_answer_that_fills_the_budget_to_the_last_token_is_complete():
    sample = await run(ScriptedEngine(["one!", "end"]), shout, budget=13)
    assert (sample.response, sample.status) == ("one![ONE!]end", Status.COMPLETED)


async def test_a_turn_that_runs_out_of_tokens_truncates_the_sample_without_a_reply():
    sample = await run(ScriptedEngine(["one!", "twotwo!"]), shout, budget=14)
    assert (sample.response, sample.status) == ("one![ONE!]twot", Status.TRUNCATED)
    assert sample.turn_ends == [4, 14]


async def test_a_turn_may_be_cut_short_and_answered():
    async def hurry(turn) -> str | None:
        return "(short!)" if turn.number == 0 else None

    sample = await run(ScriptedEngine(["one", "two!"]), hurry, max_turn_tokens=2)
    assert (sample.response, sample.status) == ("on(short!)tw", Status.TRUNCATED)


async def test_a_turn_that_ends_by_itself_at_its_limit_is_complete():
    async def nothing(turn) -> str | None:
        return None

    sample = await run(ScriptedEngine(["ok"]), nothing, max_turn_tokens=2)
    assert (sample.response, sample.status) == ("ok", Status.COMPLETED)


async def test_a_prompt_that_fills_the_context_is_truncated_and_asks_nothing():
    engine = ScriptedEngine([], context_tokens=1)
    sample = await run(engine, shout)
    assert (sample.status, sample.response_length, sample.turn_ends) == (Status.TRUNCATED, 0, [])


async def test_an_engine_that_stops_for_length_before_the_budget_truncates_the_sample():
    class ShortEngine(ScriptedEngine):
        async def generate(self, tokens, sampling_params, **request):
            return await super().generate(tokens, {**sampling_params, "max_new_tokens": 2}, **request)

    sample = await run(ShortEngine(["one!"]), shout)
    assert (sample.response, sample.status) == ("on", Status.TRUNCATED)


async def test_a_sample_without_a_prompt_is_refused():
    with pytest.raises(DataError, match="--prompt-data"):
        await run(ScriptedEngine([]), shout, Sample())


async def test_a_reply_of_token_ids_is_taken_as_it_is():
    async def ids(turn) -> list[int] | None:
        return [ord("o"), ord("k")] if turn.number == 0 else None

    assert (await run(ScriptedEngine(["a", "b"]), ids)).response == "aokb"


@pytest.mark.parametrize("said", ["", [], 7, [0.5]])
async def test_an_empty_reply_or_none_at_all_is_refused(said):
    async def reply(turn) -> Any:
        return said

    with pytest.raises(PluginError, match="reply"):
        await run(ScriptedEngine(["a"]), reply)


async def test_finished_turns_can_be_read_back():
    engine = ScriptedEngine(["one!", "end"])
    sample = await run(engine, shout)
    assert [(turn.number, turn.text) for turn in turns_of(engine, sample, {})] == [(0, "one!"), (1, "end")]


async def test_a_restarted_sample_counts_its_turns_and_tool_calls_afresh():
    async def one_call(turn) -> str | None:
        return (await call_tools(turn.sample, [give("x")], timeout_s=1))[0].text if turn.number == 0 else None

    sample = await run(ScriptedEngine(["a", "b"]), one_call)
    sample.restart()
    sample = await run(ScriptedEngine(["a", "b"]), one_call, sample)
    assert (sample.turn_ends, sample.metadata["tool_calls"]) == ([1, 3], 1)


# --- tools ------------------------------------------------------------------------------------------------------------
async def give(text: str) -> str:
    return text


async def fail() -> str:
    raise ConnectionError("the service is down")


async def hang() -> str:
    await asyncio.Event().wait()
    return "never"


async def test_parallel_calls_come_back_in_order_and_fail_each_by_itself():
    sample = prompt()
    results = await call_tools(sample, [hang(), give("x"), fail(), give("y")], timeout_s=0.05)
    assert [result.text for result in results] == ["no result within 0.05 s", "x", "the service is down", "y"]
    assert [result.failed for result in results] == [True, False, True, False]
    assert (sample.metadata["tool_calls"], sample.metadata["failed_tool_calls"]) == (4, 2)


async def test_an_error_for_the_user_ends_the_other_calls_and_is_raised():
    ended = asyncio.Event()

    async def wait() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return "never"

    async def misconfigured() -> str:
        raise OptionError("there is no key")

    with pytest.raises(OptionError, match="no key"):
        await call_tools(prompt(), [wait(), misconfigured()], timeout_s=None)
    async with asyncio.timeout(120):
        await ended.wait()


async def test_calls_of_a_turn_run_at_the_same_time():
    both = asyncio.Barrier(2)

    async def meet() -> str:
        await both.wait()
        return "met"

    results = await call_tools(prompt(), [meet(), meet()], timeout_s=10)
    assert [result.text for result in results] == ["met", "met"]


async def test_stopping_the_round_cancels_a_running_tool_and_keeps_the_turn():
    engine = ScriptedEngine(["one!"])
    ended = asyncio.Event()

    async def stuck(turn) -> str:
        engine.stop()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return "never"

    sample = await run(engine, stuck)
    assert ended.is_set()
    assert (sample.response, sample.status, sample.turn_ends) == ("one!", Status.ABORTED, [4])
    assert (await run(ScriptedEngine(["end"]), shout, sample)).response == "one![ONE!]end"


async def test_an_error_of_the_environment_itself_is_raised():
    async def broken(turn) -> str:
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        await run(ScriptedEngine(["one!"]), broken)


async def test_a_running_tool_holds_no_place_at_the_engine():
    """One place: the first sample's tool waits for an answer that the second sample gets meanwhile."""
    second_answered = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        ids = (await request.json())["input_ids"]
        if ids == [2]:
            second_answered.set()
        meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 33, None]], "weight_version": "0"}
        return web.json_response({"text": "!", "meta_info": meta})

    async def wait(turn) -> str | None:
        if turn.sample.tokens[0] == 1:
            await second_answered.wait()
        return "go on" if turn.number == 0 else None

    app = web.Application()
    app.router.add_post("/generate", answer)
    async with (
        served(app) as url,
        EngineClient(url, tokenizer=CharacterTokenizer(), concurrency=1, timeout_s=10) as client,
    ):
        samples = [Sample(tokens=np.array([first], np.int32)) for first in (1, 2)]
        async with asyncio.timeout(20):
            await asyncio.gather(*(run(SampleEngine(client, Requests(), 0, s), wait, s) for s in samples))
    assert [sample.response for sample in samples] == ["!go on!"] * 2


# --- one trajectory as several samples --------------------------------------------------------------------------------
async def test_a_split_trains_each_turn_once_with_all_before_it_as_its_prompt():
    sample = await run(ScriptedEngine(["one!", "two!", "end"]), shout)
    sample.reward, sample.turn_rewards = 1.0, [0.1, 0.2, 0.3]
    parts = split_turns(sample)
    texts = [CharacterTokenizer().decode(part.tokens) for part in parts]
    assert texts == ["?one!", "?one![ONE!]two!", "?one![ONE!]two![TWO!]end"]
    assert [part.response_length for part in parts] == [4, 4, 3]
    assert all(part.loss_mask.all() and not np.isnan(part.logprobs).any() for part in parts)
    assert [(part.reward, part.turn_rewards) for part in parts] == [(1.0, [0.1]), (1.0, [0.2]), (1.0, [0.3])]
    assert [part.shares_reward for part in parts] == [True, True, False]
    for part in parts:
        part.check()


def test_a_sample_without_turns_is_its_own_part():
    sample = prompt()
    assert split_turns(sample) == [sample]
