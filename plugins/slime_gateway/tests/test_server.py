"""The official clients, unmodified, against the server."""

import asyncio
import json

import aiohttp
import anthropic
import openai
import pytest

from slime_core import Status
from slime_gateway.exchange import Exchange
from slime_gateway.outcome import Outcome
from slime_gateway.server import Server
from slime_gateway.task import Task

TOOL = {"name": "find", "description": "looks things up", "parameters": {"type": "object", "properties": {}}}
OPENAI_TOOL = {"type": "function", "function": TOOL}
ANTHROPIC_TOOL = {"name": "find", "description": "looks things up", "input_schema": TOOL["parameters"]}
CALL = '<tool_call>{"name": "find", "arguments": {"q": "tea"}}</tool_call>'


class Place:
    """A server with one session, on an engine that plays a part."""

    def __init__(self, url, exchange, session, engine):
        self.url, self.exchange, self.session, self.engine = url, exchange, session, engine
        self.running = asyncio.create_task(session.run(engine, session.prototype))
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=session.key, max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, api_key=session.key, max_retries=0)

    async def samples(self):
        self.session.end(Outcome())
        return await self.running

    async def begun(self, count=1):
        while self.engine.under_way < count:
            await asyncio.sleep(0.005)


@pytest.fixture
async def serve(playing, make_session, tokenizer):
    """`place = await serve(*script)`; everything is closed when the test ends."""
    servers, places = [], []

    async def start(*script, program_key=None, **limits) -> Place:
        exchange, session = Exchange(), make_session(**limits)
        exchange.open(session)
        servers.append(Server(exchange, tokenizer, program_key))
        places.append(Place(await servers[-1].start("127.0.0.1", 0), exchange, session, playing(*script)))
        return places[-1]

    yield start
    for place in places:
        place.running.cancel()
        await place.openai.close()
        await place.anthropic.close()
    for server in servers:
        await server.close()


# --- OpenAI ----------------------------------------------------------------------------------------------------------
async def test_openai_turns_are_one_token_exact_sample(serve, tokenizer):
    place = await serve("four", "five")
    messages = [{"role": "user", "content": "2+2?"}]
    for expected in ("four", "five"):
        answer = await place.openai.chat.completions.create(model="any", messages=messages)
        assert answer.choices[0].message.content == expected
        assert answer.choices[0].finish_reason == "stop"
        messages += [answer.choices[0].message, {"role": "user", "content": "sure?"}]
    assert answer.usage.completion_tokens == len("five") + 1
    (sample,) = await place.samples()
    assert sample.tokens.tolist() == [*place.engine.requests[1][0], *tokenizer.encode("five<|im_end|>")]
    assert sample.loss_mask.sum() == len("four.five.")


async def test_an_openai_stream_says_the_same_and_is_recorded_the_same(serve, tokenizer):
    place = await serve("x" * 200)
    asked = {"model": "any", "messages": [{"role": "user", "content": "go"}]}
    stream = await place.openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "x" * 200
    assert sum(map(bool, texts)) > 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == 201
    (sample,) = await place.samples()
    assert tokenizer.decode(sample.tokens).endswith("x" * 200 + "<|im_end|>")


async def test_openai_tool_calls_go_forth_and_back(serve, tokenizer):
    place = await serve("let me see " + CALL, "kettle")
    messages = [{"role": "user", "content": "tea?"}]
    answer = await place.openai.chat.completions.create(model="any", messages=messages, tools=[OPENAI_TOOL])
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert (message.content, call.function.name) == ("let me see", "find")
    assert json.loads(call.function.arguments) == {"q": "tea"}
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "hot"}]
    await place.openai.chat.completions.create(model="any", messages=messages, tools=[OPENAI_TOOL])
    (sample,) = await place.samples()
    own = tokenizer.decode(sample.tokens[sample.prompt_length :][sample.loss_mask > 0])
    assert own == f"let me see {CALL}<|im_end|>kettle<|im_end|>"


async def test_openai_tool_calls_stream(serve):
    place = await serve(CALL)
    asked = {"messages": [{"role": "user", "content": "tea?"}], "tools": [OPENAI_TOOL]}
    async with place.openai.chat.completions.stream(model="any", **asked) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == '{"q": "tea"}'
    assert final.choices[0].finish_reason == "tool_calls"


async def test_openai_logprobs_are_those_of_the_engine(serve):
    place = await serve("ab")
    asked = {"model": "any", "messages": [{"role": "user", "content": "go"}], "logprobs": True}
    content = (await place.openai.chat.completions.create(**asked)).choices[0].logprobs.content
    (sample,) = await place.samples()
    assert [entry.token for entry in content] == ["a", "b", "<|im_end|>"]
    assert [entry.logprob for entry in content] == sample.logprobs.tolist()


async def test_the_run_decides_how_is_sampled_not_the_request(serve):
    place = await serve("x")
    messages = [{"role": "user", "content": "go"}]
    await place.openai.chat.completions.create(model="any", messages=messages, temperature=0.1, top_p=0.2, seed=1)
    params = place.engine.requests[0][1]
    assert params == {"temperature": 1.0, "max_new_tokens": 2048, "stop": []}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": "hello"}, "at least one message"),
        ({"messages": [{"content": "x"}]}, "message 0 must be an object with a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "tool_calls must be a list"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "function with a name"),
        ({"messages": [{"role": "user", "content": "x"}], "n": 2}, "n > 1"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "at least 1"),
        ({"messages": [{"role": "user", "content": "x"}], "stop": [1]}, "`stop` must be"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": "x"}, "`tools` must be"),
        ({"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}, "tool_choice"),
        (
            {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "response_format": "json"}, "response_format"),
        ({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": 3}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": 1}}, "template refuses"),
        ({"messages": [{"role": "user", "content": "x"}], "stream": True, "stream_options": 3}, "stream_options"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "template refuses"),
        ("[" * 100_000, "not JSON"),
        ([], "JSON object"),
        ("{", "not JSON"),
    ],
)
async def test_a_bad_request_is_told_what_is_wrong_and_leaves_no_trace(serve, body, words):
    place = await serve("x")
    data = body if isinstance(body, str) else json.dumps(body)
    headers = {"Authorization": f"Bearer {place.session.key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(f"{place.url}/v1/chat/completions", data=data) as answer,
    ):
        assert answer.status == 400
        assert words in (await answer.json())["error"]["message"]
    assert not place.session.trajectories.all
    assert not place.engine.requests


async def test_a_wrong_key_is_refused(serve):
    place = await serve("x")
    stranger = place.openai.with_options(api_key="slime-guess")
    with pytest.raises(openai.AuthenticationError, match="no session has this key"):
        await stranger.chat.completions.create(model="any", messages=[{"role": "user", "content": "go"}])


async def test_a_session_that_is_over_refuses(serve):
    place = await serve("x")
    asked = {"model": "any", "messages": [{"role": "user", "content": "go"}]}
    await place.openai.chat.completions.create(**asked)
    await place.samples()
    with pytest.raises(openai.APIStatusError) as refused:
        await place.openai.chat.completions.create(**asked)
    assert refused.value.status_code == 410


# --- Anthropic -------------------------------------------------------------------------------------------------------
async def test_anthropic_turns_are_one_token_exact_sample(serve, tokenizer):
    place = await serve(CALL, "kettle")
    asked = {"model": "any", "max_tokens": 500, "system": "be brief", "tools": [ANTHROPIC_TOOL]}
    messages = [{"role": "user", "content": "tea?"}]
    answer = await place.anthropic.messages.create(**asked, messages=messages)
    assert answer.stop_reason == "tool_use"
    (use,) = answer.content
    assert (use.name, use.input) == ("find", {"q": "tea"})
    messages += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "hot"}]},
    ]
    answer = await place.anthropic.messages.create(**asked, messages=messages)
    assert (answer.content[0].text, answer.stop_reason) == ("kettle", "end_turn")
    (sample,) = await place.samples()
    own = tokenizer.decode(sample.tokens[sample.prompt_length :][sample.loss_mask > 0])
    assert own == f"{CALL}<|im_end|>kettle<|im_end|>"
    assert "<|im_start|>system\nbe brief" in tokenizer.decode(sample.tokens)


async def test_an_anthropic_stream_says_the_same(serve):
    place = await serve("thinking " + CALL)
    asked = {"model": "any", "max_tokens": 500, "tools": [ANTHROPIC_TOOL]}
    async with place.anthropic.messages.stream(**asked, messages=[{"role": "user", "content": "tea?"}]) as stream:
        message = await stream.get_final_message()
    text, use = message.content
    assert (text.text, use.name, use.input, message.stop_reason) == ("thinking", "find", {"q": "tea"}, "tool_use")
    (sample,) = await place.samples()
    assert message.usage.output_tokens == sample.loss_mask.sum()


async def test_numbers_of_any_size_come_and_go_unchanged(serve):
    place = await serve(
        '<tool_call>{"name": "find", "arguments": {"n": 1000000000000000000000000000001}}</tool_call>', "x"
    )
    asked = {"model": "any", "max_tokens": 500, "tools": [ANTHROPIC_TOOL]}
    messages = [{"role": "user", "content": "tea?"}]
    answer = await place.anthropic.messages.create(**asked, messages=messages)
    assert answer.content[0].input == {"n": 10**30 + 1}
    messages += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": answer.content[0].id, "content": "hot"}]},
    ]
    await place.anthropic.messages.create(**asked, messages=messages)
    assert len(await place.samples()) == 1


async def test_an_anthropic_stop_sequence_is_named(serve):
    place = await serve("one STOP")
    asked = {"model": "any", "max_tokens": 500, "stop_sequences": ["STOP"]}
    answer = await place.anthropic.messages.create(**asked, messages=[{"role": "user", "content": "go"}])
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("one ", "stop_sequence", "STOP")


async def test_anthropic_tokens_are_counted_as_they_are_rendered(serve):
    place = await serve("x")
    messages = [{"role": "user", "content": "hello"}]
    counted = await place.anthropic.messages.count_tokens(model="any", messages=messages)
    await place.anthropic.messages.create(model="any", max_tokens=5, messages=messages)
    assert counted.input_tokens == len(place.engine.requests[0][0])


async def test_an_anthropic_client_hears_what_is_wrong(serve):
    place = await serve("x")
    with pytest.raises(anthropic.BadRequestError, match="blocks of type image"):
        await place.anthropic.messages.create(
            model="any", max_tokens=5, messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}]
        )


# --- streams while the model writes -----------------------------------------------------------------------------------
async def told(stream, text: str) -> None:
    """Read an OpenAI stream until it has said this, and no more."""
    heard = ""
    while heard != text:
        assert text.startswith(heard)
        chunk = await anext(stream)
        heard += chunk.choices[0].delta.content or ""


async def test_an_openai_stream_tells_the_text_while_the_model_writes(serve, tokenizer):
    place = await serve("four and more")
    place.engine.hold()
    place.engine.num_partial = 4
    asked = {"model": "any", "messages": [{"role": "user", "content": "2+2?"}]}
    stream = aiter(await place.openai.chat.completions.create(**asked, stream=True))
    await told(stream, "four")
    assert place.engine.under_way == 1
    place.engine.release()
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == " and more"
    messages = [*asked["messages"], {"role": "assistant", "content": "four and more"}, {"role": "user", "content": "?"}]
    await place.openai.chat.completions.create(model="any", messages=messages)
    (sample,) = await place.samples()
    assert tokenizer.decode(sample.tokens).count("four and more<|im_end|>") == 2
    assert place.session.trajectories.counts == {}


async def test_a_stream_keeps_a_begun_tool_call_to_itself(serve):
    place = await serve("let me see " + CALL)
    place.engine.hold()
    place.engine.num_partial = len("let me see <tool_call>{")
    asked = {"model": "any", "messages": [{"role": "user", "content": "tea?"}], "tools": [OPENAI_TOOL]}
    stream = aiter(await place.openai.chat.completions.create(**asked, stream=True))
    await told(stream, "let me see")
    place.engine.release()
    rest = [chunk.choices[0].delta async for chunk in stream]
    assert not any(delta.content for delta in rest)
    (call,) = [call for delta in rest for call in delta.tool_calls or ()]
    assert json.loads(call.function.arguments) == {"q": "tea"}


async def test_an_anthropic_stream_tells_the_text_while_the_model_writes(serve):
    place = await serve("let me see " + CALL)
    place.engine.hold()
    place.engine.num_partial = len("let me")
    asked = {"model": "any", "max_tokens": 500, "messages": [{"role": "user", "content": "tea?"}]}
    async with place.anthropic.messages.stream(**asked, tools=[ANTHROPIC_TOOL]) as stream:
        assert await anext(aiter(stream.text_stream)) == "let me"
        assert place.engine.under_way == 1
        place.engine.release()
        final = await stream.get_final_message()
    assert [block.type for block in final.content] == ["text", "tool_use"]
    assert (final.content[0].text, final.content[1].input) == ("let me see", {"q": "tea"})


async def test_an_agent_that_disconnects_while_it_is_told_aborts_its_request(serve):
    place = await serve("never heard to its end")
    place.engine.hold()
    place.engine.num_partial = 5
    stream = await place.openai.chat.completions.create(
        model="any", messages=[{"role": "user", "content": "go"}], stream=True
    )
    await told(aiter(stream), "never")
    await stream.close()
    while not place.engine.num_cancelled or place.session.trajectories.all:
        await asyncio.sleep(0.005)
    (sample,) = await place.samples()
    assert (sample.status, sample.response_length) == (Status.FAILED, 0)


# --- agents that go away ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_that_disconnects_while_the_model_writes_leaves_nothing_behind(serve, stream):
    place = await serve("never heard")
    place.engine.hold()
    body = {"messages": [{"role": "user", "content": "go"}], "stream": stream}
    headers = {"Authorization": f"Bearer {place.session.key}"}
    async with aiohttp.ClientSession(headers=headers) as client:
        asking = asyncio.create_task(client.post(f"{place.url}/v1/chat/completions", json=body))
        await place.begun()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    while place.engine.under_way:
        await asyncio.sleep(0.005)
    assert place.engine.num_cancelled == 1
    while place.session.trajectories.all:
        await asyncio.sleep(0.005)
    (sample,) = await place.samples()
    assert sample.status is Status.FAILED


async def test_an_agent_that_disconnects_in_the_midst_of_a_stream_and_asks_again_is_trained_once(serve, tokenizer):
    long = "y" * 20_000_000  # more than sockets hold, so that the server is still writing
    place = await serve([*tokenizer.encode("x"), tokenizer.eos_token_id], "again")
    first = place.session.generate

    async def lengthened(turn, request, on_text=None):
        reply = await first(turn, request)
        return reply if reply.content != "x" else type(reply)(**{**vars(reply), "content": long})

    place.session.generate = lengthened
    body = {"messages": [{"role": "user", "content": "go"}], "stream": True}
    headers = {"Authorization": f"Bearer {place.session.key}"}
    async with aiohttp.ClientSession(headers=headers, read_bufsize=2**10) as client:
        answer = await client.post(f"{place.url}/v1/chat/completions", json=body)
        await answer.content.read(100)
        answer.close()
    while place.session.counts["undelivered"] == 0:
        await asyncio.sleep(0.005)
    again = await place.openai.chat.completions.create(model="any", messages=body["messages"])
    assert again.choices[0].message.content == "again"
    (sample,) = await place.samples()
    assert sample.response == "again"


# --- programs that come by themselves ---------------------------------------------------------------------------------
async def test_a_program_fetches_a_task_works_on_it_and_writes_its_reward(serve):
    place = await serve("4")
    task = Task("2+2?", "4", {}, f"{place.url}/v1", place.session.key, group_index=1, index=3)
    async with aiohttp.ClientSession() as program:
        async with program.post(f"{place.url}/start_rollout", json={"max_wait_s": 0}) as answer:
            assert answer.status == 204
        place.exchange.offer(task)
        async with program.post(f"{place.url}/start_rollout", json={}) as answer:
            given = Task(**await answer.json())
        client = place.openai.with_options(api_key=given.api_key, base_url=given.base_url)
        said = await client.chat.completions.create(model="any", messages=given.messages)
        reward = float(said.choices[0].message.content == given.label)
        headers = {"Authorization": f"Bearer {given.api_key}"}
        async with program.post(
            f"{place.url}/buffer/write", json={"reward": reward, "n": 2}, headers=headers
        ) as answer:
            assert (await answer.json()) == {"success": True}
        (sample,) = await place.running
        assert (sample.reward, sample.rewards) == (1.0, {"gateway": 1.0, "gateway/n": 2.0})
        place.exchange.close(place.session)
        place.exchange.keep([sample])
        async with program.post(f"{place.url}/get_rollout_data") as answer:
            data = await answer.json()
        assert data["meta_info"] == {"num_sessions": 1, "num_groups": 1, "num_samples": 1, "mean_reward": 1.0}
        assert data["data"][0][0]["tokens"] == sample.tokens.tolist()
        async with program.post(f"{place.url}/get_rollout_data") as answer:
            assert (await answer.json())["data"] == []
        async with program.get(f"{place.url}/stats") as answer:
            stats = await answer.json()
        assert (stats["sessions"], stats["turns"], stats["samples"], stats["open_sessions"]) == (1, 1, 1, 0)


@pytest.mark.parametrize("body", [{"reward": "high"}, {"reward": None, "n": "x"}, {"response": 3}])
async def test_an_outcome_that_cannot_be_used_is_refused(serve, body):
    place = await serve("x")
    headers = {"Authorization": f"Bearer {place.session.key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as program,
        program.post(f"{place.url}/buffer/write", json=body) as answer,
    ):
        assert answer.status == 400
    assert not place.session.over


async def test_with_a_key_only_programs_that_have_it_get_tasks(serve):
    place = await serve("x", program_key="secret")
    async with aiohttp.ClientSession() as program:
        for headers, status in (({}, 401), ({"Authorization": "Bearer wrong"}, 401), ({"x-api-key": "secret"}, 204)):
            async with program.post(f"{place.url}/start_rollout", json={"max_wait_s": 0}, headers=headers) as answer:
                assert answer.status == status
