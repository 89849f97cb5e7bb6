"""Broadcasts whose members die, and where their store listens."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess as Process
from typing import Any

import psutil
import pytest
import torch
from aiohttp import web

from served import served
from slime_core.engines.admin import EngineAdmin
from slime_core.engines.process import LOOPBACK
from slime_core.engines.weight_group import WeightGroup, in_daemon_thread, meet_at
from slime_core.errors import WeightSyncError
from slime_core.weights.broadcast import EVERYWHERE, BroadcastTransport, common_address
from slime_core.weights.source import Update

NUM_NUMBERS = 1 << 22
"""More than the sockets between two members hold."""


def join(address: str, port: int, size: int, name: str, rank: int) -> WeightGroup:
    return WeightGroup(meet_at(address, port, size), name, rank, size, "gloo", 600)


def join_for_ever(*told: Any) -> None:
    group = join(*told)
    time.sleep(600)
    group.leave()


class Member:
    """For SGLang, which needs an environment of its own: while a broadcast blocks it, it ends no update.

    A doomed one is a process of its own, which is killed as soon as an update begins.
    """

    def __init__(self, doomed: bool) -> None:
        self._doomed = doomed
        self._process: Process | None = None
        self.left: list[str] = []
        self._group: WeightGroup | None = None
        self._free = asyncio.Event()
        self._free.set()

    async def server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"device": "cpu", "tp_size": 1, "pp_size": 1, "dp_size": 1})

    async def join(self, request: web.Request) -> web.Response:
        told = await request.json()
        size, rank, name = told["world_size"], told["rank_offset"], told["group_name"]
        self.store = (told["master_address"], told["master_port"])

        meet = partial(join, *self.store, size, name, rank)
        if self._doomed:
            self._process = get_context("spawn").Process(target=join_for_ever, args=meet.args, daemon=True)
            self._process.start()
        else:
            self._group = await in_daemon_thread(meet)
        return web.json_response({"success": True})

    async def receive(self, request: web.Request) -> web.Response:
        if self._group is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        self._free.clear()
        try:
            await in_daemon_thread(partial(self._group.broadcast, [torch.empty(NUM_NUMBERS)]))
        except RuntimeError as error:
            return web.Response(status=400, text=str(error))
        finally:
            self._free.set()
        return web.json_response({"success": True})

    async def begin(self, request: web.Request) -> web.Response:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        return web.json_response({"success": True})

    async def end(self, request: web.Request) -> web.Response:
        await self._free.wait()
        return web.json_response({"success": True})

    async def leave(self, request: web.Request) -> web.Response:
        self.left.append((await request.json())["group_name"])
        return web.json_response({"success": True})

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes(
            [
                web.get("/server_info", self.server_info),
                web.post("/init_weights_update_group", self.join),
                web.post("/begin_weight_update", self.begin),
                web.post("/update_weights_from_distributed", self.receive),
                web.post("/end_weight_update", self.end),
                web.post("/destroy_weights_update_group", self.leave),
            ]
        )
        async with served(app) as url:
            yield url


def update() -> Update:
    return Update(1, lambda: iter([("weight", torch.zeros(NUM_NUMBERS))]), {})


@pytest.mark.parametrize("doomed", [0, 2])
async def test_an_engine_that_dies_in_a_broadcast_does_not_hold_up_the_others(doomed):
    members = [Member(doomed == number) for number in range(4)]
    transport = BroadcastTransport(1 << 30, 600, colocated=False, external=False)
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(member.serve()) for member in members]
        admin = await stack.enter_async_context(EngineAdmin(urls, 600))
        with pytest.raises(WeightSyncError, match="version 1 were not taken"):
            async with asyncio.timeout(300), transport.offer(admin, update()) as deliver:
                await deliver()
    transport.close()


@pytest.mark.parametrize(
    ("seen", "address"),
    [
        ([LOOPBACK, LOOPBACK], LOOPBACK),
        ([LOOPBACK, "10.0.0.5"], "10.0.0.5"),
        (["10.0.0.5", "172.17.0.1"], EVERYWHERE),
    ],
)
def test_members_meet_at_an_address_that_all_reach(seen, address):
    assert common_address(seen) == address


async def test_engines_of_this_machine_meet_on_loopback_alone():
    member = Member(doomed=False)
    transport = BroadcastTransport(1 << 30, 600, colocated=False, external=False)
    async with (
        member.serve() as url,
        EngineAdmin([url], 600) as admin,
        transport.offer(admin, update()) as deliver,
    ):
        await deliver()
        sockets = [socket for socket in psutil.Process().net_connections("inet") if socket.status == "LISTEN"]
        listening = [socket.laddr.ip for socket in sockets if socket.laddr.port == member.store[1]]
    transport.close()
    assert listening == [LOOPBACK]


@pytest.mark.parametrize("external", [False, True])
async def test_an_engine_that_outlives_the_run_is_told_to_leave_the_group(external):
    member = Member(doomed=False)
    transport = BroadcastTransport(1 << 30, 600, colocated=False, external=external)
    async with member.serve() as url, EngineAdmin([url], 600) as admin:
        async with transport.offer(admin, update()) as deliver:
            await deliver()
        name = transport._name
        await asyncio.to_thread(transport.close)
    assert member.left == [name] * external
