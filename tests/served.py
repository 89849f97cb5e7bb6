"""A stand-in server on loopback. (aiohttp's TestServer cancels handlers whose client is gone; real engines do not.)"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

LOOPBACK = "127.0.0.1"


@asynccontextmanager
async def served(app: web.Application, port: int = 0) -> AsyncIterator[str]:
    """The address at which the application answers, on any free port unless one is given."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, LOOPBACK, port).start()
    try:
        yield f"http://{LOOPBACK}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
