"""Whatever an engine does, who talks to it gets an error that names it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from served import served
from slime_core.engines.admin import EngineAdmin, Refused
from slime_core.engines.process import LOOPBACK, free_port
from slime_core.errors import EngineError

CALLS = {
    "server_infos": (),
    "checksums": (),
    "pause": ("abort",),
    "prompt_logprobs": ([1, 2],),
    "update_weights_from_disk": ("nowhere", 1),
}


@pytest.mark.parametrize("name", CALLS)
async def test_an_engine_that_is_gone_is_named(name):
    url = f"http://{LOOPBACK}:{free_port()}"
    async with EngineAdmin([url], 120) as admin:
        with pytest.raises(EngineError, match=f"{url}/.* did not answer"):
            await getattr(admin, name)(*CALLS[name])


async def test_an_engine_that_refuses_is_quoted(server):
    async with EngineAdmin([server.url], 30) as admin:
        with pytest.raises(Refused, match=r"update_weights_from_disk answered HTTP 400: .*nowhere") as caught:
            await admin.update_weights_from_disk("nowhere", 1)
    assert caught.value.status == 400


@contextlib.asynccontextmanager
async def stand_in(role: str, **sizes: int) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """For a SGLang of a pair, which needs a transfer backend of its own: refuses prompts as those do.

    Every data-parallel copy of it gives other numbers.
    """
    asked: list[dict[str, Any]] = []

    async def server_info(request: web.Request) -> web.Response:
        one = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "disaggregation_bootstrap_port": 1}
        return web.json_response({"version": "0.5.23", "disaggregation_mode": role, **one, **sizes})

    async def generate(request: web.Request) -> web.Response:
        asked.append(await request.json())
        if role != "null" and "bootstrap_room" not in asked[-1]:
            return web.Response(status=400, text="Disaggregated request received without bootstrap room id")
        given = -0.5 - asked[-1].get("routed_dp_rank", 0)
        return web.json_response({"meta_info": {"input_token_logprobs": [[None, 1, None], [given, 2, None]]}})

    async def checksums(request: web.Request) -> web.Response:
        ranks = [{"checksums": {"w": str(rank)}} for rank in range(sizes.get("dp_size", 1))]
        return web.json_response({"ranks": ranks})

    app = web.Application()
    app.add_routes([web.get("/server_info", server_info), web.post("/generate", generate)])
    app.add_routes([web.post("/weights_checker", checksums)])
    async with served(app) as url:
        yield url, asked


async def test_engines_of_a_pair_are_asked_for_a_prompt_where_they_read_one():
    async with stand_in("prefill") as one, stand_in("decode") as other, stand_in("null") as both:
        urls = [url for url, _ in (one, other, both)]
        admin = await EngineAdmin(urls, 30).__aenter__()
        assert await admin.prompt_logprobs([1, 2]) == {urls[0]: [-0.5], urls[2]: [-0.5]}
        await admin.__aexit__()
    assert [["bootstrap_room" in body for body in asked] for _, asked in (one, other, both)] == [[True], [], [False]]


@pytest.mark.parametrize("sizes", [{"dp_size": 2}, {"dp_size": 1, "attn_dp_size": 2, "tp_size": 2}])
async def test_every_copy_of_an_engine_is_asked_for_the_prompt(sizes):
    async with stand_in("null", **sizes) as (url, _), EngineAdmin([url], 30) as admin:
        assert await admin.prompt_logprobs([1, 2]) == {f"copy 0 of {url}": [-0.5], f"copy 1 of {url}": [-1.5]}


async def test_every_rank_of_an_engine_tells_its_checksums():
    async with stand_in("null", dp_size=2) as (url, _), EngineAdmin([url], 30) as admin:
        assert await admin.checksums() == {f"rank 0 of {url}": {"w": "0"}, f"rank 1 of {url}": {"w": "1"}}
    async with stand_in("null") as (url, _), EngineAdmin([url], 30) as admin:
        assert await admin.checksums() == {url: {"w": "0"}}
