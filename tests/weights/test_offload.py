"""Engines are told to free their memory in the only order that stock SGLang survives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from served import served
from slime_core.engines.admin import EngineAdmin
from slime_core.errors import EngineError, OptionError
from slime_core.testing import make_options
from slime_core.weights.offload import REST, WEIGHTS, Offload
from slime_core.weights.sync import WeightSync
from weights.conftest import ConstantTrainer

ALL = ["cuda_graph", "kv_cache", "weights"]
Calls = list[tuple[str, dict]]


@asynccontextmanager
async def recording_server(num_busy: int) -> AsyncIterator[tuple[str, Calls]]:
    """A stand-in for SGLang that notes what it is told and refuses to flush its cache so many times, as a busy one."""
    calls: Calls = []

    async def handle(request: web.Request) -> web.Response:
        name = request.path.strip("/")
        if name == "server_info":
            return web.json_response({"version": "0.5.9", "device": "cuda", "tp_size": 1, "pp_size": 1, "dp_size": 1})
        body = await request.json()
        if name == "generate":
            prompt = body["input_ids"]
            return web.json_response({"meta_info": {"input_token_logprobs": [[-1.0, token, None] for token in prompt]}})
        calls.append((name, body))
        busy = name == "flush_cache" and [call for call, _ in calls].count(name) <= num_busy
        return web.Response(status=400 if busy else 200, text="Flush cache failed." if busy else "null")

    app = web.Application()
    app.router.add_route("*", "/{name}", handle)
    async with served(app) as url:
        yield url, calls


async def test_memory_is_released_only_once_nothing_runs():
    async with recording_server(2) as (url, calls), EngineAdmin([url], 120) as admin:
        await Offload().release(admin)
    assert calls == [
        ("pause_generation", {"mode": "abort"}),
        *[("flush_cache", {})] * 3,
        ("release_memory_occupation", {"tags": ALL}),
    ]


async def test_an_engine_that_stays_busy_is_never_told_and_goes_on():
    async with recording_server(10**6) as (url, calls), EngineAdmin([url], 120) as admin:
        with pytest.raises(EngineError, match=r"does not get idle, and cannot free its memory: .*Flush cache failed"):
            await Offload(idle_timeout_s=0.3).release(admin)
    names = [name for name, _ in calls]
    assert "release_memory_occupation" not in names
    assert names[0] == "pause_generation" and names[-1] == "continue_generation"


async def test_weights_come_back_before_the_rest_and_each_once():
    offload = Offload()
    async with recording_server(0) as (url, calls), EngineAdmin([url], 120) as admin:
        await offload.take_back(admin, WEIGHTS)
        assert calls == [], "nothing was released"
        await offload.release(admin)
        await offload.release(admin)
        assert [name for name, _ in calls].count("release_memory_occupation") == 1
        calls.clear()
        for tags in (WEIGHTS, WEIGHTS, REST, REST):
            await offload.take_back(admin, tags)
    assert calls == [
        ("resume_memory_occupation", {"tags": ["weights"]}),
        ("resume_memory_occupation", {"tags": ["cuda_graph", "kv_cache"]}),
    ]


async def test_only_engines_that_released_it_get_it_back():
    offload = Offload()
    async with recording_server(0) as (first, calls), recording_server(0) as (second, other_calls):
        async with EngineAdmin([first], 5) as admin:
            await offload.release(admin)
        calls.clear()
        async with EngineAdmin([first, second], 5) as admin:
            await offload.take_back(admin, WEIGHTS)
            offload.keep_only([second])
            await offload.take_back(admin, REST)
    assert calls == [("resume_memory_occupation", {"tags": ["weights"]})]
    assert other_calls == []


async def test_a_trainer_keeps_no_more_memory_than_it_uses_when_engines_take_theirs_back(tmp_path):
    words = ["--engine", "sglang", "--offload-engines", "--weights-dir", str(tmp_path)]
    async with recording_server(0) as (url, calls):

        class Noting(ConstantTrainer):
            def free_cache(self) -> None:
                calls.append(("free_cache", {}))

        sync = WeightSync(make_options(*words), [url], tmp_path)
        await sync.release()
        calls.clear()
        await sync.send(Noting(), 1)
        sync.close()
    names = [
        name for name, _ in calls if name in ("free_cache", "resume_memory_occupation", "update_weights_from_disk")
    ]
    assert names == [
        *("free_cache", "resume_memory_occupation"),
        "update_weights_from_disk",
        *("free_cache", "resume_memory_occupation"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--engine embedded, which computes on the CPU"),
        (["--engine", "sglang", "--external-engines", "http://a:1"], "--external-engines"),
        (["--engine", "sglang", "--placement", "disaggregated"], "--placement disaggregated"),
        (["--engine", "sglang", "--max-staleness", "1"], "this --max-staleness"),
        (["--engine", "sglang", "--num-trainers", "0"], "--num-trainers 0"),
        (["--engine", "sglang", "--num-engines", "0"], "--num-engines 0"),
    ],
)
def test_it_is_refused_where_there_is_nothing_to_share(words, message):
    with pytest.raises(OptionError, match=f"--offload-engines does not go with {message}"):
        make_options("--offload-engines", *words)
