"""Conversations become samples: token by token, drift and branches apart, aborted turns continued, limits kept."""

import asyncio

import numpy as np
import pytest

from slime_core import EngineError, Status
from slime_gateway.chat import ChatRequest, Refusal
from slime_gateway.outcome import Outcome


async def talk(session, engine, *requests):
    """Answer requests one after another, end the session; its replies and samples."""
    running = asyncio.create_task(session.run(engine, session.prototype))
    replies = []
    for request in requests:
        turn = await session.begin(request)
        replies.append(await session.generate(turn, request))
    session.end(Outcome(reward=1.0))
    return replies, await running


def trained(sample) -> list[int]:
    return sample.tokens[sample.prompt_length :][sample.loss_mask > 0].tolist()


async def test_a_conversation_is_one_sample_whose_own_tokens_are_trained(playing, make_session, asking, tokenizer):
    engine = playing("four", "no, five")
    replies, (sample,) = await talk(make_session(), engine, asking("2+2?"), asking("2+2?", "four", "sure?"))
    assert [reply.content for reply in replies] == ["four", "no, five"]
    text = tokenizer.decode(sample.tokens)
    assert text == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n"
        "<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\nno, five<|im_end|>"
    )
    assert tokenizer.decode(trained(sample)) == "four<|im_end|>no, five<|im_end|>"
    assert tokenizer.decode(sample.tokens[: sample.prompt_length]).endswith("assistant\n")
    own = sample.loss_mask > 0
    assert np.array_equal(np.isnan(sample.logprobs), ~own)
    assert np.array_equal(sample.weight_versions >= 0, own)
    assert (sample.reward, sample.status, sample.index) == (1.0, Status.COMPLETED, 3)


async def test_the_second_request_goes_on_from_the_sampled_tokens_not_from_their_text(
    playing, make_session, asking, tokenizer
):
    one, two = tokenizer.convert_tokens_to_ids(["1", "2"])
    odd = [one, two, tokenizer.eos_token_id]
    assert tokenizer.encode("12", add_special_tokens=False) != odd[:2]
    engine, session = playing(odd, "ok"), make_session()
    _, (sample,) = await talk(session, engine, asking("7+5?"), asking("7+5?", "12", "sure?"))
    first, second = (tokens for tokens, _ in engine.requests)
    assert second[: len(first) + 3] == first + odd
    assert sample.tokens.tolist() == second + tokenizer.encode("ok", add_special_tokens=False) + odd[-1:]
    assert session.trajectories.counts == {"retokenized": 1}


async def test_an_answer_that_comes_back_changed_forks_the_conversation(playing, make_session, asking, tokenizer):
    engine, session = playing(" four ", "yes"), make_session()
    _, samples = await talk(session, engine, asking("2+2?"), asking("2+2?", "four", "sure?"))
    assert session.trajectories.counts["drift"] == 1
    first, second = samples
    assert tokenizer.decode(trained(first)) == " four <|im_end|>"
    assert tokenizer.decode(trained(second)) == "yes<|im_end|>"
    assert tokenizer.decode(second.tokens).count("four<|im_end|>") == 1
    assert second.response_length == len(trained(second))
    assert [sample.reward for sample in samples] == [1.0, 1.0]


async def test_a_template_that_forgets_thoughts_forks_the_conversation(playing, make_session, asking, tokenizer):
    engine, session = playing("<think>hm</think>four", "yes"), make_session()
    kwargs = {"template_kwargs": {"strip_thoughts": True}}
    _, samples = await talk(
        session, engine, asking("2+2?", **kwargs), asking("2+2?", "<think>hm</think>four", "sure?", **kwargs)
    )
    assert session.trajectories.counts["drift"] == 1
    assert [tokenizer.decode(trained(s)) for s in samples] == ["<think>hm</think>four<|im_end|>", "yes<|im_end|>"]
    assert "hm" not in tokenizer.decode(samples[1].tokens)


async def test_a_second_attempt_at_a_turn_is_a_branch_that_shares_the_prompts_tokens(
    playing, make_session, asking, tokenizer
):
    engine, session = playing("one", "two", "three"), make_session()
    requests = asking("go"), asking("go", "one", "more"), asking("go", "one", "less")
    _, samples = await talk(session, engine, *requests)
    assert session.trajectories.counts == {"branch": 1}
    assert [tokenizer.decode(trained(s)) for s in samples] == ["one<|im_end|>two<|im_end|>", "three<|im_end|>"]
    shared = samples[0].prompt_length + len("one") + 1
    assert samples[0].tokens[:shared].tolist() == samples[1].tokens[:shared].tolist()


async def test_a_conversation_of_its_own_is_a_sample_of_its_own(playing, make_session, asking):
    engine, session = playing("a", "b"), make_session()
    _, samples = await talk(session, engine, asking("main"), asking("a subagent's task"))
    assert len(samples) == 2
    assert session.trajectories.counts == {}


async def test_conversations_at_the_same_time_do_not_mix(playing, make_session, asking, tokenizer):
    engine, session = playing(lambda tokens: [*tokens[6:15], tokenizer.eos_token_id]), make_session()
    running = asyncio.create_task(session.run(engine, session.prototype))
    requests = [asking(f"subtask {number}") for number in (*range(20), 7)]

    async def ask(request):
        return await session.generate(await session.begin(request), request)

    await asyncio.gather(*map(ask, requests))
    session.end(Outcome())
    samples = await running
    assert len(samples) == 21
    for sample in samples:
        assert trained(sample)[:-1] == sample.tokens[6:15].tolist()


async def test_the_conversation_that_was_heard_last_is_graded_and_the_others_share_its_reward(
    playing, make_session, asking
):
    engine, session = playing(" draft ", "final"), make_session()
    running = asyncio.create_task(session.run(engine, session.prototype))
    for request in (asking("go"), asking("go", "changed", "again")):
        await session.generate(await session.begin(request), request)
    session.end(Outcome())
    assert [(sample.response, sample.shares_reward) for sample in await running] == [
        (" draft ", True),
        ("final", False),
    ]


async def test_a_returned_answer_is_what_is_graded(playing, make_session, asking):
    session = make_session()
    running = asyncio.create_task(session.run(playing("thinking aloud"), session.prototype))
    request = asking("go")
    await session.generate(await session.begin(request), request)
    session.end(Outcome(response="42", rewards={"steps": 3.0}))
    (sample,) = await running
    assert (sample.response, sample.reward, sample.rewards) == ("42", None, {"gateway/steps": 3.0})


# --- tools -----------------------------------------------------------------------------------------------------------
CALL = '<tool_call>{"arguments":{"q":"tea"},  "name":"find"}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {}}}]


def tool_request(*further) -> ChatRequest:
    return ChatRequest([{"role": "user", "content": "tea?"}, *further], tools=TOOLS)


async def test_a_tool_call_that_comes_back_unchanged_goes_on_though_the_template_writes_it_otherwise(
    playing, make_session, tokenizer
):
    session = make_session()
    running = asyncio.create_task(session.run(playing(CALL, "kettle"), session.prototype))
    first = tool_request()
    reply = await session.generate(await session.begin(first), first)
    (call,) = reply.tool_calls
    assert (call.name, call.arguments, reply.finish_reason) == ("find", '{"q": "tea"}', "tool_calls")
    sent_back = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call.id, "type": "function", "function": {"name": "find", "arguments": {"q": "tea"}}}],
    }
    second = tool_request(sent_back, {"role": "tool", "content": "hot", "tool_call_id": call.id})
    await session.generate(await session.begin(second), second)
    session.end(Outcome())
    (sample,) = await running
    assert tokenizer.decode(trained(sample)) == f"{CALL}<|im_end|>kettle<|im_end|>"
    assert session.trajectories.counts == {}


async def test_a_tool_call_that_the_agent_changed_forks_the_conversation(playing, make_session):
    session = make_session()
    running = asyncio.create_task(session.run(playing(CALL, "kettle"), session.prototype))
    first = tool_request()
    reply = await session.generate(await session.begin(first), first)
    call = {"id": reply.tool_calls[0].id, "type": "function"}
    changed = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{**call, "function": {"name": "find", "arguments": {}}}],
    }
    second = tool_request(changed, {"role": "tool", "content": "hot"})
    await session.generate(await session.begin(second), second)
    session.end(Outcome())
    assert len(await running) == 2
    assert session.trajectories.counts["drift"] == 1


@pytest.mark.parametrize(
    "said",
    [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "find", "arguments": "q"}</tool_call>',
        '<tool_call>{"name": "find"}',
        '<tool_call>{"name": "find"}</tool_call><tool_call>{</tool_call>',
        "<tool_call>" + "[" * 100_0 + "</tool_call>",
        "</tool_call><tool_call>",
    ],
)
async def test_a_malformed_tool_call_is_text(playing, make_session, said):
    session = make_session()
    running = asyncio.create_task(session.run(playing(said), session.prototype))
    request = tool_request()
    reply = await session.generate(await session.begin(request), request)
    assert (reply.content, reply.tool_calls, reply.finish_reason) == (said, [], "stop")
    session.end(Outcome())
    await running


# --- limits ----------------------------------------------------------------------------------------------------------
async def test_an_agent_in_an_endless_loop_is_refused_and_its_sample_truncated(playing, make_session, asking):
    session, engine = make_session(max_turns=3), playing("again")
    running = asyncio.create_task(session.run(engine, session.prototype))
    texts = ["go"]
    with pytest.raises(Refusal, match="max-turns 3") as refused:
        for _ in range(100):
            request = asking(*texts)
            reply = await session.generate(await session.begin(request), request)
            texts += [reply.content, "more"]
    assert (refused.value.status, len(engine.requests)) == (400, 3)
    session.end(Outcome(error="the agent failed: BadRequestError"))
    (sample,) = await running
    assert sample.status is Status.TRUNCATED
    assert len(trained(sample)) == 3 * len("again.")


async def test_an_agent_that_never_ends_is_given_up_with_what_it_did(playing, make_session, asking):
    session, request = make_session(timeout_s=0.3), asking("go")
    turn = await session.begin(request)  # before its time runs
    running = asyncio.create_task(session.run(playing("a start"), session.prototype))
    await session.generate(turn, request)
    (sample,) = await running
    assert (sample.status, sample.response) == (Status.TRUNCATED, "a start")
    with pytest.raises(Refusal, match="over"):
        await session.begin(request)


async def test_a_request_that_runs_when_the_agent_ends_is_refused_and_not_trained(playing, make_session, asking):
    engine, session = playing("kept", "lost"), make_session()
    running = asyncio.create_task(session.run(engine, session.prototype))
    first, second = asking("go"), asking("go", "kept", "more")
    await session.generate(await session.begin(first), first)
    engine.hold()
    late = asyncio.create_task(session.generate(await session.begin(second), second))
    while not engine.under_way:
        await asyncio.sleep(0)
    session.end(Outcome(reward=0.5))
    (sample,) = await running
    assert sample.response == "kept"
    with pytest.raises(Refusal) as refused:
        await late
    assert refused.value.status == 410
    assert engine.num_cancelled == 1


async def test_max_response_tokens_bound_the_whole_conversation(playing, make_session, asking):
    session = make_session(max_new_tokens=60)
    running = asyncio.create_task(session.run(playing("x" * 40), session.prototype))
    first, second = asking("go"), asking("go", "x" * 40, "more")
    await session.generate(await session.begin(first), first)
    with pytest.raises(Refusal) as refused:
        await session.begin(second)
    assert refused.value.code == "context_length_exceeded"
    session.end(Outcome())
    (sample,) = await running
    assert (sample.status, sample.response_length) == (Status.TRUNCATED, 41)


async def test_a_requests_own_limit_and_stop_strings_reach_the_engine(playing, make_session, asking):
    session, engine = make_session(), playing("one two three")
    running = asyncio.create_task(session.run(engine, session.prototype))
    request = asking("go", max_tokens=5, stop=["w"])
    reply = await session.generate(await session.begin(request), request)
    assert (reply.content, reply.finish_reason, reply.stop_string) == ("one t", "length", None)
    assert (engine.requests[0][1]["max_new_tokens"], engine.requests[0][1]["stop"]) == (5, ["w"])
    session.end(Outcome())
    await running


async def test_an_agent_that_asks_nothing_fails(playing, make_session):
    session = make_session()
    session.end(Outcome(reward=1.0))
    (sample,) = await session.run(playing("x"), session.prototype)
    assert sample.status is Status.FAILED
    assert "without a single answered request" in sample.failure


async def test_an_agent_that_fails_has_no_reward(playing, make_session, asking):
    session = make_session()
    running = asyncio.create_task(session.run(playing("x"), session.prototype))
    request = asking("go")
    await session.generate(await session.begin(request), request)
    session.end(Outcome(error="the agent failed: KeyError: 'x'"))
    (sample,) = await running
    assert (sample.status, sample.reward, sample.failure) == (Status.FAILED, None, "the agent failed: KeyError: 'x'")


async def test_an_engine_error_reaches_the_run_not_only_the_agent(playing, make_session, asking):
    def refuse(tokens):
        raise EngineError("the engine refused a request")

    session = make_session()
    running = asyncio.create_task(session.run(playing(refuse), session.prototype))
    request = asking("go")
    with pytest.raises(Refusal) as refused:
        await session.generate(await session.begin(request), request)
    assert refused.value.status == 500
    with pytest.raises(EngineError, match="refused"):
        await running


# --- partial rollout --------------------------------------------------------------------------------------------------
async def stopped_in_a_turn(session, engine, request):
    """Run a session until its round is stopped in the middle of a turn; the samples, and the turn that waits."""
    running = asyncio.create_task(session.run(engine, session.prototype))
    engine.hold()
    answer = asyncio.create_task(session.generate(await session.begin(request), request))
    while not engine.under_way:
        await asyncio.sleep(0)
    engine.stop()
    return await running, answer


async def test_an_aborted_turn_goes_on_in_the_next_round_with_the_new_weights(playing, make_session, asking, tokenizer):
    session, first = make_session(), playing("abcdef")
    first.num_partial = 2
    (waiting,), answer = await stopped_in_a_turn(session, first, asking("go"))
    assert (waiting.status, tokenizer.decode(trained(waiting))) == (Status.ABORTED, "ab")
    second = playing("cdef")
    second.version = 1
    running = asyncio.create_task(session.run(second, waiting.clone()))
    assert (await answer).content == "abcdef"
    session.end(Outcome())
    (sample,) = await running
    assert tokenizer.decode(trained(sample)) == "abcdef<|im_end|>"
    assert sample.weight_versions.tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert second.requests[0][0] == waiting.tokens.tolist()


async def test_a_turn_that_goes_on_in_the_next_round_is_told_once(playing, make_session, asking):
    session, first, told = make_session(), playing("one STOP and more"), []
    first.num_partial = len("one ST")
    request = asking("go", stop=["STOP"])
    running = asyncio.create_task(session.run(first, session.prototype))
    first.hold()
    answer = asyncio.create_task(session.generate(await session.begin(request), request, told.append))
    while not first.under_way:
        await asyncio.sleep(0)
    assert told == ["one "]
    first.stop()
    (waiting,) = await running
    running = asyncio.create_task(session.run(playing("ART and more"), waiting))
    reply = await answer
    assert "".join(told) == reply.content == "one START and more"
    session.end(Outcome())
    await running


async def test_a_stop_string_that_an_abort_cut_in_two_ends_the_turn(playing, make_session, asking, tokenizer):
    session, first = make_session(), playing("one STOP and more")
    first.num_partial = len("one ST")
    (waiting,), answer = await stopped_in_a_turn(session, first, asking("go", stop=["STOP"]))
    running = asyncio.create_task(session.run(playing("OP and more"), waiting))
    reply = await answer
    assert (reply.content, reply.finish_reason, reply.stop_string) == ("one ", "stop", "STOP")
    session.end(Outcome())
    (sample,) = await running
    assert tokenizer.decode(trained(sample)) == "one STOP"


async def test_a_sample_of_a_session_that_is_gone_may_wait_again_before_its_agent_asks(playing, make_session):
    session, engine = make_session(), playing("x")
    lost = session.prototype.clone()
    lost.metadata["gateway_trajectory"] = 3
    again = type(session)(
        lost,
        tokenizer=engine.tokenizer,
        context_tokens=4096,
        sampling_params={"max_new_tokens": 9, "stop": []},
        template_kwargs={},
        limits=session._limits,
    )
    running = asyncio.create_task(again.run(engine, lost))
    await asyncio.sleep(0)
    engine.stop()
    (waiting,) = await running
    assert again.knows(waiting)


async def test_tokens_that_were_masked_while_a_sample_waited_stay_masked(playing, make_session, asking):
    session, first = make_session(), playing("abcdef")
    first.num_partial = 2
    (waiting,), answer = await stopped_in_a_turn(session, first, asking("go"))
    waiting.loss_mask = np.zeros_like(waiting.loss_mask)
    running = asyncio.create_task(session.run(playing("cdef"), waiting))
    await answer
    session.end(Outcome())
    (sample,) = await running
    assert sample.loss_mask.tolist() == [0, 0, 1, 1, 1, 1, 1]


async def test_every_conversation_of_a_waiting_session_comes_back_once(playing, make_session, asking, tokenizer):
    session, first = make_session(), playing(" one ", "two")
    engine_turn = asking("go")
    running = asyncio.create_task(session.run(first, session.prototype))
    await session.generate(await session.begin(engine_turn), engine_turn)
    first.hold()
    forked = asking("go", "one", "more")
    answer = asyncio.create_task(session.generate(await session.begin(forked), forked))
    while not first.under_way:
        await asyncio.sleep(0)
    first.stop()
    waiting = await running
    assert [sample.status for sample in waiting] == [Status.ABORTED] * 2
    second = playing("two", "three")
    returning = [asyncio.create_task(session.run(second, sample.clone())) for sample in waiting]
    await answer
    alone = asking("another")
    await session.generate(await session.begin(alone), alone)
    session.end(Outcome())
    parts = await asyncio.gather(*returning)
    assert [[tokenizer.decode(trained(s)) for s in part] for part in parts] == [
        [" one <|im_end|>", "three<|im_end|>"],
        ["two<|im_end|>"],
    ]


async def test_a_request_between_rounds_waits_for_the_next(playing, make_session, asking):
    session, first = make_session(), playing("x")
    running = asyncio.create_task(session.run(first, session.prototype))
    await asyncio.sleep(0)
    first.stop()
    (waiting,) = await running
    request = asking("go")
    answer = asyncio.create_task(session.generate(await session.begin(request), request))
    await asyncio.sleep(0.01)
    assert not answer.done()
    running = asyncio.create_task(session.run(playing("late"), waiting))
    assert (await answer).content == "late"
    session.end(Outcome())
    (sample,) = await running
    assert sample.response == "late"


async def test_a_generation_aborted_in_mid_round_goes_on_at_once(playing, make_session, asking, tokenizer):
    engine, session = playing("abcdef"), make_session()
    whole = engine.generate
    num_aborts = 0

    async def abort_twice(tokens, params, **request):
        nonlocal num_aborts
        generation = await whole(tokens, params, **request)
        if num_aborts == 2:
            return generation
        num_aborts += 1
        return engine._generation(list(tokens), tokenizer.encode("-", add_special_tokens=False), "abort")

    engine.generate = abort_twice
    running = asyncio.create_task(session.run(engine, session.prototype))
    request = asking("go")
    reply = await session.generate(await session.begin(request), request)
    assert reply.content == "--abcdef"
    session.end(Outcome())
    await running
