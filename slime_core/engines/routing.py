"""Keeps a router before the engines that serve: they come and go, and a router that dies is started again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence

from slime_core.engines.router import Router
from slime_core.errors import EngineError
from slime_core.options import Options

logger = logging.getLogger(__name__)

POLL_S = 0.5
MAX_FAILED_RESTARTS = 3


class Routing:
    """Built and used inside a running event loop. The client's requests are sent again while there is no router."""

    def __init__(self, args: Options, router: Router, worker_urls: Sequence[str]) -> None:
        self._router = router
        self._timeout_s: float = args.engine_health_timeout_s
        self._worker_urls = list(worker_urls)
        self._lock = asyncio.Lock()
        self._problem: EngineError | None = None
        self._watching = asyncio.create_task(self._watch())

    @property
    def url(self) -> str:
        """Where requests go."""
        return self._router.url

    def check(self) -> None:
        """Do nothing while there is a router, or may be one again.

        Raises:
            EngineError: when it cannot be started again.
        """
        if self._problem is not None:
            raise self._problem

    async def admit(self, url: str) -> None:
        """Let an engine take requests.

        Raises:
            EngineError: when the router lives and does not find it healthy.
        """
        async with self._lock:
            self._worker_urls.append(url)
            try:
                await asyncio.to_thread(self._router.add, url)
            except EngineError:
                # a router that died is started again, and told of all
                if await asyncio.to_thread(self._router.alive, self._timeout_s):
                    self._worker_urls.remove(url)
                    raise

    async def dismiss(self, url: str) -> None:
        """Send an engine nothing more."""
        async with self._lock:
            if url in self._worker_urls:
                self._worker_urls.remove(url)
            with contextlib.suppress(EngineError):
                await asyncio.to_thread(self._router.remove, url)

    async def close(self) -> None:
        """End the router."""
        self._watching.cancel()
        while not (await asyncio.wait([self._watching], timeout=POLL_S))[0]:
            await asyncio.to_thread(self._router.stop)  # a start under way ends by what it starts being stopped
        await asyncio.to_thread(self._router.stop)

    async def _watch(self) -> None:
        num_failed = 0
        while self._problem is None:
            await asyncio.sleep(POLL_S)
            if await asyncio.to_thread(self._router.alive, self._timeout_s):
                continue
            code = self._router.process.exit_code()
            logger.warning(
                "the router %s; it is started again", "hangs" if code is None else f"exited with code {code}"
            )
            async with self._lock:
                try:
                    await _to_the_end(asyncio.to_thread(self._router.restart, self._worker_urls))
                    num_failed = 0
                except EngineError as error:
                    num_failed += 1
                    if num_failed == MAX_FAILED_RESTARTS:
                        self._problem = error


async def _to_the_end(threaded: Coroutine[None, None, None]) -> None:
    """Await what runs in a thread also when cancelled: the thread goes on all the same."""
    running = asyncio.create_task(threaded)
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.gather(running, return_exceptions=True)
        raise
