"""A service that plays a part: it answers as it is told and keeps what it was sent."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer


class ScriptedService:
    """Answers the n-th request with the n-th entry, the last one ever after.

    An entry is a JSON value, a function (perhaps async) from the body to one, or a tuple: HTTP status, text and perhaps
    headers.
    """

    def __init__(self, script: tuple[Any, ...], delay_s: float, hold_until: int) -> None:
        self._script = script
        self._delay_s = delay_s
        self._hold_until, self._several = hold_until, asyncio.Event()
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.under_way = self.most_under_way = 0
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/{path:.*}", self._answer)
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("/v1"))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        entry = self._script[min(len(self.bodies), len(self._script) - 1)]
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.paths.append(request.path)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        if self.under_way >= self._hold_until:
            self._several.set()
        await self._several.wait()
        await asyncio.sleep(self._delay_s)
        self.under_way -= 1
        if isinstance(entry, tuple):
            status, text, *headers = entry
            return web.Response(status=status, text=text, headers=headers[0] if headers else None)
        value = entry(body) if callable(entry) else entry
        return web.json_response(await value if inspect.isawaitable(value) else value)


@pytest.fixture
async def serve():
    """`service = await serve(entry, ...)`: a running service, stopped when the test ends.

    It holds its answers until `hold_until` requests have been under way at once.
    """
    services = []

    async def start(*script: Any, delay_s: float = 0.0, hold_until: int = 0) -> ScriptedService:
        services.append(ScriptedService(script, delay_s, hold_until))
        await services[-1].server.start_server()
        return services[-1]

    yield start
    for service in services:
        await service.server.close()


@pytest.fixture
async def closing():
    """`plugin = closing(Plugin(args))`: closed when the test ends."""
    plugins = []

    def remember(plugin: Any) -> Any:
        plugins.append(plugin)
        return plugin

    yield remember
    for plugin in plugins:
        plugin.close()
    await asyncio.sleep(0)
