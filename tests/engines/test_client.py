"""The client: SGLang's answers understood, faults retried, refusals passed on, concurrency limited."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from served import served
from slime_core import EngineError, Sample, Status
from slime_core.engines.client import EngineClient, SampleEngine, parse_generation
from slime_core.engines.requests import Requests
from tiny_model import byte_tokenizer

CAPTURES = Path(__file__).parent / "captures"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def captured(name: str) -> dict:
    return json.loads((CAPTURES / f"{name}.json").read_text())["response"]


@asynccontextmanager
async def scripted_server(generate: Handler) -> AsyncIterator[str]:
    """A stand-in for an engine whose /generate does what the test wants."""
    app = web.Application()
    app.router.add_post("/generate", generate)
    async with served(app) as url:
        yield url


def client_of(url: str, **options: float) -> EngineClient:
    return EngineClient(url, tokenizer=byte_tokenizer(), **{"concurrency": 8, "timeout_s": 20.0, **options})


@pytest.mark.parametrize("name", ["generate_greedy_logprob", "generate_greedy_logprob_0.5.9"])
def test_tokens_and_logprobs_of_a_real_answer(name):
    answer = captured(name)
    generation = parse_generation(answer)
    assert generation.tokens.tolist() == answer["output_ids"]
    assert len(generation.logprobs) == 8 and (generation.logprobs < 0).all()
    assert generation.weight_versions.tolist() == [0] * 8
    assert (generation.status, generation.prompt_tokens) == (Status.TRUNCATED, 7)


def test_finish_reasons_of_real_answers():
    assert parse_generation(captured("gen_eos")).status is Status.COMPLETED
    aborted = parse_generation(json.loads((CAPTURES / "abort_rid_x1.json").read_text())["response"])
    assert aborted.status is Status.ABORTED and len(aborted.tokens) == len(aborted.logprobs) > 0


def test_a_weight_update_in_the_middle_gives_two_spans():
    answer = captured("generate_greedy_logprob")
    answer["meta_info"]["weight_versions"] = [
        {"version": "3", "start": 0, "end": 5},
        {"version": "4", "start": 5, "end": 8},
    ]
    assert parse_generation(answer).weight_versions.tolist() == [3] * 5 + [4] * 3


@pytest.mark.parametrize(
    "answer", [{}, {"text": "", "meta_info": {}}, {"text": "", "meta_info": {"finish_reason": None}}]
)
def test_an_answer_that_is_not_sglangs_is_refused(answer):
    with pytest.raises(EngineError, match="the engine's answer is not SGLang's"):
        parse_generation(answer)


def streamed(*counts: int, finish: dict | None = None) -> list[bytes]:
    """Events of a captured answer: its first tokens, as many as each count says; the last ends for `finish`."""
    events = []
    for number, count in enumerate(counts, 1):
        answer = captured("generate_greedy_logprob")
        meta = answer["meta_info"]
        meta["output_token_logprobs"] = meta["output_token_logprobs"][:count]
        meta["completion_tokens"] = count
        meta["finish_reason"] = finish if number == len(counts) else None
        events.append(b"data: " + json.dumps(answer).encode() + b"\n\n")
    return events


def says(*answers: list[bytes]) -> tuple[Handler, list[dict]]:
    """A handler that gives these chunks, answer after answer, and breaks the connection off behind each; the bodies."""
    bodies: list[dict] = []

    async def generate(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in answers[len(bodies) - 1]:
            await response.write(chunk)
            await asyncio.sleep(0.01)
        if request.transport is not None:
            request.transport.close()
        return response

    return generate, bodies


async def test_a_stream_tells_tokens_as_they_come_and_gives_the_whole_answer():
    length = {"type": "length", "length": 8}
    *begun, last = streamed(1, 3, 8, finish=length)
    cut = len(last) // 2
    handler, bodies = says([*begun, last[:cut], last[cut:], b"data: [DONE]\n\n"])
    told: list[list[int]] = []
    async with scripted_server(handler) as url, client_of(url) as client:
        generation = await client.generate([1], {}, on_tokens=told.append)
    expected = captured("generate_greedy_logprob")["output_ids"]
    assert told == [expected[:1], expected[:3], expected]
    assert (generation.tokens.tolist(), generation.status) == (expected, Status.TRUNCATED)
    assert bodies[0]["stream"] is True


async def test_a_stream_that_breaks_off_is_an_aborted_answer_and_not_begun_again():
    handler, bodies = says(streamed(2, 5))
    async with scripted_server(handler) as url, client_of(url) as client:
        generation = await client.generate([1], {}, on_tokens=lambda tokens: None)
    assert (len(generation.tokens), len(generation.logprobs), generation.status) == (5, 5, Status.ABORTED)
    assert len(bodies) == 1


@pytest.mark.parametrize("broken", [[], streamed(0), [b'data: {"error": {"message": "no memory", "code": 500}}\n\n']])
async def test_a_stream_that_breaks_off_before_its_first_token_is_asked_again(broken):
    handler, bodies = says(broken, streamed(4, 8, finish={"type": "stop", "matched": 1}))
    async with scripted_server(handler) as url, client_of(url) as client:
        generation = await client.generate([1], {}, on_tokens=lambda tokens: None)
    assert (len(generation.tokens), generation.status, len(bodies)) == (8, Status.COMPLETED, 2)


async def test_a_refusal_within_a_stream_is_passed_on_at_once():
    handler, bodies = says([b'data: {"error": {"message": "top_p must be in (0, 1]"}}\n\n'])
    async with scripted_server(handler) as url, client_of(url) as client:
        with pytest.raises(EngineError, match=r"refused a request \(top_p must be"):
            await client.generate([1], {}, on_tokens=lambda tokens: None)
    assert len(bodies) == 1


async def test_a_stream_in_pieces_is_refused_by_name():
    event = streamed(3)[0].replace(b'"completion_tokens": 3', b'"completion_tokens": 6')
    handler, _ = says([event])
    async with scripted_server(handler) as url, client_of(url) as client:
        with pytest.raises(EngineError, match="--incremental-streaming-output"):
            await client.generate([1], {}, on_tokens=lambda tokens: None)


async def test_a_refusal_is_passed_on_at_once_with_the_servers_words():
    calls = 0

    async def refuse(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        return web.json_response({"error": {"message": "The input (5000 tokens) is longer"}}, status=400)

    async with scripted_server(refuse) as url, client_of(url) as client:
        with pytest.raises(EngineError, match=r"refused a request \(HTTP 400: The input \(5000 tokens\) is longer\)"):
            await client.generate([1], {})
    assert calls == 1


async def test_server_errors_cut_answers_and_broken_connections_are_retried():
    rids = []

    async def stumble(request: web.Request) -> web.StreamResponse:
        rids.append((await request.json())["rid"])
        match len(rids):
            case 1:
                return web.json_response({"error": {"message": "busy"}}, status=503)
            case 2:
                request.transport.close()
                return web.Response()
            case 3:
                response = web.StreamResponse(headers={"Content-Length": "1000"})
                await response.prepare(request)
                await response.write(b'{"text": "')
                request.transport.close()
                return response
            case 4:
                return web.Response(text='{"text": "cut o')
        return web.json_response(captured("generate_greedy_logprob"))

    async with scripted_server(stumble) as url, client_of(url) as client:
        generation = await client.generate(np.array([1, 2]), {"temperature": 0})
    assert len(generation.tokens) == 8
    assert len(set(rids)) == 5, "every try has a request id of its own"


async def test_the_deadline_ends_retries_and_names_the_last_problem():
    async def broken(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no available workers"}}, status=503)

    async with scripted_server(broken) as url, client_of(url, timeout_s=1.0) as client:
        started = time.monotonic()
        with pytest.raises(EngineError, match="within 1 s; the last problem was HTTP 503: no available workers"):
            await client.generate([1], {})
    assert time.monotonic() - started < 60


async def test_what_an_engine_said_is_told_though_the_next_one_hangs():
    num_asked = 0

    async def refuse_then_hang(request: web.Request) -> web.Response:
        nonlocal num_asked
        num_asked += 1
        if num_asked > 1:
            await asyncio.sleep(60)
        return web.json_response({"error": {"message": "no available workers"}}, status=503)

    async with scripted_server(refuse_then_hang) as url, client_of(url, timeout_s=3.0) as client:
        with pytest.raises(EngineError, match="the last problem was HTTP 503: no available workers"):
            await client.generate([1], {})
    assert num_asked == 2


async def test_a_request_gets_the_time_back_that_its_engine_took_before_it_died():
    num_asked = 0

    async def die_then_answer(request: web.Request) -> web.Response:
        nonlocal num_asked
        num_asked += 1
        await asyncio.sleep(3.2)
        if num_asked == 1:
            return web.json_response({"error": {"message": "the engine died"}}, status=502)
        return web.json_response(captured("generate_greedy_logprob"))

    async with scripted_server(die_then_answer) as url, client_of(url, timeout_s=6.0) as client:
        generation = await client.generate([1], {})
    assert num_asked == 2 and len(generation.tokens) == 8


async def test_an_engine_that_never_answers_is_given_up():
    async def hang(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    async with scripted_server(hang) as url, client_of(url, timeout_s=0.5) as client:
        with pytest.raises(EngineError, match="the last problem was TimeoutError"):
            await client.generate([1], {})


async def test_at_most_so_many_requests_are_under_way():
    running, most = 0, 0

    async def count(request: web.Request) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return web.json_response(captured("generate_greedy_logprob"))

    async with scripted_server(count) as url, client_of(url, concurrency=3) as client:
        await asyncio.gather(*(client.generate([1], {}) for _ in range(12)))
    assert most == 3


async def test_cancelling_disconnects_so_that_the_engine_can_stop():
    arrived, disconnected = asyncio.Event(), asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        arrived.set()
        try:
            while request.transport is not None and not request.transport.is_closing():
                await asyncio.sleep(0.01)
        finally:
            disconnected.set()
        return web.Response()

    async with scripted_server(hang) as url, client_of(url) as client:
        task = asyncio.create_task(client.generate([1], {}))
        await arrived.wait()
        task.cancel()
        await asyncio.wait_for(disconnected.wait(), 60)
        assert client._slots._value == 8


async def test_every_request_of_a_sample_has_a_seed_of_its_own_and_the_same_one_each_time():
    seeds: list[list[int]] = []

    async def note(request: web.Request) -> web.Response:
        seeds[-1].append((await request.json())["sampling_params"]["sampling_seed"])
        return web.json_response(captured("generate_greedy_logprob"))

    async with scripted_server(note) as url, client_of(url) as client:
        for run_seed, index in ((1, 0), (1, 0), (1, 1), (2, 0)):
            seeds.append([])
            engine = SampleEngine(client, Requests(), run_seed, Sample(index=index))
            for _ in range(3):
                await engine.generate([1], {"temperature": 1.0})
        seeds.append([])
        await SampleEngine(client, Requests(), 1, Sample(index=0)).generate([1], {"sampling_seed": 5})
        continued = Sample(index=0)
        continued.append([7])
        seeds.append([])
        await SampleEngine(client, Requests(), 1, continued).generate([1], {})
    assert seeds[0] == seeds[1]
    assert len({seed for row in (seeds[0], seeds[2], seeds[3]) for seed in row}) == 9
    assert seeds[4] == [5]
    assert seeds[5][0] != seeds[0][0], "a continuation must not repeat the draws of the beginning"


class Abortable:
    """An engine whose requests answer only when they are aborted, with one token; it notes what it is told."""

    def __init__(self, ignored_aborts: int = 0) -> None:
        self.events: dict[str, asyncio.Event] = {}
        self.aborts: list[dict] = []
        self._ignored = ignored_aborts

    async def generate(self, request: web.Request) -> web.Response:
        event = self.events.setdefault((await request.json())["rid"], asyncio.Event())
        await event.wait()
        answer = json.loads((CAPTURES / "abort_rid_x1.json").read_text())["response"]
        return web.json_response(answer)

    async def abort(self, request: web.Request) -> web.Response:
        self.aborts.append(body := await request.json())
        if len(self.aborts) > self._ignored:
            for rid, event in self.events.items():
                if body.get("abort_all") or body.get("rid") == rid:
                    event.set()
        return web.Response()

    @asynccontextmanager
    async def client(self, **options: float) -> AsyncIterator[EngineClient]:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        async with served(app) as url, client_of(url, worker_urls=[url], **options) as client:
            yield client

    async def received(self, count: int) -> None:
        while len(self.events) < count:
            await asyncio.sleep(0.005)


async def test_stopped_requests_answer_with_their_tokens_and_others_go_on():
    engine = Abortable()
    async with engine.client() as client:
        ours, others = Requests(), Requests()
        stopped = [asyncio.create_task(client.generate([1], {}, requests=ours)) for _ in range(3)]
        other = asyncio.create_task(client.generate([1], {}, requests=others))
        await engine.received(4)
        await client.abort(ours, 5)
        generations = await asyncio.wait_for(asyncio.gather(*stopped), 5)
        assert all(g.status is Status.ABORTED and len(g.tokens) > 0 for g in generations)
        assert not other.done() and not any("abort_all" in body for body in engine.aborts)
        await client.abort(others, 5)
        assert (await other).status is Status.ABORTED
        assert engine.aborts[-1] == {"abort_all": True}, "nobody else was left"


async def test_a_request_that_waits_for_its_turn_is_not_sent_once_stopped():
    engine = Abortable()
    async with engine.client(concurrency=1) as client:
        requests = Requests()
        tasks = [asyncio.create_task(client.generate([1], {}, requests=requests)) for _ in range(3)]
        await engine.received(1)
        await client.abort(requests, 5)
        generations = await asyncio.wait_for(asyncio.gather(*tasks), 5)
        assert len(engine.events) == 1
        assert sorted(len(g.tokens) > 0 for g in generations) == [False, False, True]


async def test_an_engine_is_told_again_until_it_lets_go():
    engine = Abortable(ignored_aborts=3)
    async with engine.client() as client:
        requests = Requests()
        task = asyncio.create_task(client.generate([1], {}, requests=requests))
        await engine.received(1)
        await client.abort(requests, 10)
        assert len(engine.aborts) > 3
        assert (await task).status is Status.ABORTED


async def test_an_abort_that_nobody_answers_is_bounded():
    engine = Abortable(ignored_aborts=10**9)
    async with engine.client() as client:
        requests = Requests()
        task = asyncio.create_task(client.generate([1], {}, requests=requests))
        await engine.received(1)
        before = time.monotonic()
        await client.abort(requests, 0.3)
        assert 0.3 <= time.monotonic() - before < 60
        assert not task.done()
        task.cancel()


async def test_a_failed_request_is_not_sent_again_once_stopped():
    requests = Requests()

    async def fail(request: web.Request) -> web.Response:
        requests.stop()
        return web.Response(status=503)

    async with scripted_server(fail) as url, client_of(url) as client:
        assert (await client.generate([1], {}, requests=requests)).status is Status.ABORTED
