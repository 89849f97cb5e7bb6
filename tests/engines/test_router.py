"""The real router in front of stand-in engines: sessions stay together, and no fault loses or doubles an answer."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
from aiohttp import web

from served import served
from slime_core.engines.client import EngineClient
from slime_core.engines.process import free_port
from slime_core.engines.router import Router
from slime_core.engines.routing import Routing
from slime_core.testing import make_options
from tiny_model import byte_tokenizer
from waiting import until


class Worker:
    """An engine that answers a request for session S with S's number; `dying` cuts connections instead."""

    def __init__(self, role: str = "null") -> None:
        self.info = {"version": "0.5.23", "tp_size": 1, "pp_size": 1, "dp_size": 1, "disaggregation_mode": role}
        self.info |= {"disaggregation_bootstrap_port": 4321, "model_path": "m", "is_generation": True}
        self.seen: list[dict] = []
        self.served: Counter[int] = Counter()
        self.dying = False
        self.slow_s = 0.0
        self.paused = False
        """SGLang's /health generates a token, and so fails while it stands still."""

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.seen.append(body)
        if self.dying:
            request.transport.abort()
        await asyncio.sleep(self.slow_s)
        (session,) = body["input_ids"]
        self.served[session] += 1
        finish = {"type": "length", "length": 1}
        meta = {"finish_reason": finish, "output_token_logprobs": [[-1.0, session, None]], "weight_version": "0"}
        return web.json_response({"text": "", "output_ids": [session], "meta_info": meta})

    async def anything(self, request: web.Request) -> web.Response:
        if self.paused and request.path == "/health":
            return web.Response(status=503)
        return web.json_response(self.info)

    @asynccontextmanager
    async def serve(self, port: int) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_route("*", "/{path:.*}", self.anything)
        async with served(app, port) as url:
            yield url


@asynccontextmanager
async def routed(
    log_dir: Path, *words: str, roles: Sequence[str] = ("null",) * 3
) -> AsyncIterator[tuple[list[Worker], Router, EngineClient]]:
    """Three workers, the router before them, and a client."""
    workers = [Worker(role) for role in roles]
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(worker.serve(free_port())) for worker in workers]
        router = await asyncio.to_thread(Router, make_options(*words), urls, log_dir)
        try:
            async with EngineClient(
                router.url, tokenizer=byte_tokenizer(), concurrency=64, timeout_s=60, worker_urls=urls
            ) as client:
                yield workers, router, client
        finally:
            await asyncio.to_thread(router.stop)


async def ask(client: EngineClient, number: int) -> int:
    generation = await client.generate(np.array([number]), {}, session_id=f"session-{number}")
    return int(generation.tokens[0])


async def test_the_turns_of_a_session_go_to_one_engine(tmp_path):
    async with routed(tmp_path, "--router-policy", "manual") as (workers, _, client):
        for _ in range(4):
            assert await asyncio.gather(*(ask(client, n) for n in range(30))) == list(range(30))
    assert all(sum(bool(worker.served[n]) for worker in workers) == 1 for n in range(30))
    assert sum(bool(worker.served) for worker in workers) > 1, "sessions are spread"


async def test_a_prompt_goes_to_an_engine_that_reads_it_and_one_that_generates(tmp_path):
    roles = ["prefill", "decode", "decode"]
    words = ("--engine", "sglang", "--num-engines", "3", "--num-prefill-engines", "1")
    async with routed(tmp_path, *words, roles=roles) as (workers, _, client):
        assert await asyncio.gather(*(ask(client, n) for n in range(20))) == list(range(20))
    reading, *generating = workers
    rooms = {body["bootstrap_room"]: body["input_ids"] for body in reading.seen}
    assert len(rooms) == 20
    assert all(body["bootstrap_port"] == 4321 for worker in workers for body in worker.seen)
    assert {body["bootstrap_room"]: body["input_ids"] for w in generating for body in w.seen} == rooms
    assert all(worker.seen for worker in generating), "both take part"


def kill(router: Router) -> None:
    """As the system might."""
    for child in psutil.Process(router.process._process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()


async def test_engines_that_stand_still_stay_in_the_router(tmp_path):
    async with routed(tmp_path) as (workers, router, client):
        for worker in workers:
            worker.paused = True
        deadline = time.monotonic() + 7  # two of its looks come two seconds after one another
        while time.monotonic() < deadline:
            assert all(known["is_healthy"] for known in await asyncio.to_thread(router._workers))
            await asyncio.sleep(0.5)
        assert await ask(client, 1) == 1


async def test_requests_of_an_engine_that_dies_are_answered_by_the_others(tmp_path):
    async with routed(tmp_path) as (workers, _, client):
        for worker in workers:
            worker.slow_s = 0.1
        asking = [asyncio.create_task(ask(client, n)) for n in range(60)]
        await asyncio.sleep(0.05)
        workers[0].dying = True
        assert await asyncio.gather(*asking) == list(range(60))
        assert all(sum(worker.served[n] for worker in workers) >= 1 for n in range(60))


async def test_a_router_that_is_killed_and_started_again_loses_nothing(tmp_path):
    port = str(free_port())
    async with routed(tmp_path, "--router-port", port) as (workers, router, client):
        for worker in workers:
            worker.slow_s = 0.2
        asking = [asyncio.create_task(ask(client, n)) for n in range(100)]
        await asyncio.sleep(0.1)
        kill(router)
        await asyncio.to_thread(router.stop)
        urls = client._worker_urls
        again = await asyncio.to_thread(Router, make_options("--router-port", port), urls, tmp_path)
        try:
            assert await asyncio.gather(*asking) == list(range(100))
        finally:
            await asyncio.to_thread(again.stop)


async def test_closing_ends_a_router_that_is_being_started(tmp_path, monkeypatch, caplog):
    launch, begun, free, launched = Router._launch, threading.Event(), threading.Event(), threading.Event()

    def launch_slowly(router):
        begun.set()
        free.wait(60)
        process = launch(router)
        launched.set()
        return process

    async with routed(tmp_path) as (_, router, client):
        monkeypatch.setattr(Router, "_launch", launch_slowly)
        routing = Routing(make_options(), router, client._worker_urls)
        kill(router)
        await until(begun.is_set)
        closing = asyncio.create_task(routing.close())
        await asyncio.wait([closing], timeout=0.5)
        free.set()
        await closing
        await until(launched.is_set)
        await until(lambda: router.process.exit_code() is not None, timeout_s=10)
    del closing, routing
    gc.collect()  # what nobody has looked at is complained of when it goes
    assert not [record for record in caplog.records if record.name == "asyncio"]
