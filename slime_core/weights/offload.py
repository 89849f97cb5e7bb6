"""Engines that share GPUs with trainers: they free their memory while those train, and take it back for new weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from slime_core.engines.admin import EngineAdmin, Refused
from slime_core.errors import EngineError

WEIGHTS = frozenset({"weights"})
REST = frozenset({"kv_cache", "cuda_graph"})
"""SGLang's names of what takes memory: what an update needs back, and what only requests need."""
POLL_S = 0.1
BUSY = 400
"""What /flush_cache answers while something runs."""


class Offload:
    """Remembers who has released what: SGLang dies of being told to take back what it has."""

    def __init__(self, idle_timeout_s: float = 60.0) -> None:
        self._idle_timeout_s = idle_timeout_s
        self._released: dict[str, frozenset[str]] = {}

    def keep_only(self, urls: Sequence[str]) -> None:
        """The other engines are gone."""
        self._released = {url: tags for url, tags in self._released.items() if url in urls}

    async def release(self, admin: EngineAdmin) -> None:
        """Pause the engines and free what they hold on the GPU; they stay paused.

        SGLang dies of a release while a request runs: an engine is asked only once nothing does.

        Raises:
            EngineError: when one stays busy, in which case all go on generating, or is gone.
        """
        await admin.pause("abort")
        try:
            await _until_idle(admin, self._idle_timeout_s)
        except BaseException:
            await admin.resume()
            raise
        holding = [url for url in admin.urls if url not in self._released]
        self._released |= dict.fromkeys(holding, WEIGHTS | REST)
        await admin.release_memory(holding, sorted(WEIGHTS | REST))

    async def take_back(self, admin: EngineAdmin, tags: frozenset[str]) -> None:
        """Let the engines have that again, if they have released it.

        Raises:
            EngineError: when one cannot, or is gone.
        """
        lacking = [url for url in admin.urls if tags <= self._released.get(url, frozenset())]
        for url in lacking:
            self._released[url] -= tags
            if not self._released[url]:
                del self._released[url]
        await admin.resume_memory(lacking, sorted(tags))


async def _until_idle(admin: EngineAdmin, timeout_s: float) -> None:
    """Only an idle engine flushes its cache."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            await admin.flush_cache()
            return
        except Refused as refused:
            if refused.status != BUSY or time.monotonic() > deadline:
                raise EngineError(f"an engine does not get idle, and cannot free its memory: {refused}") from None
        await asyncio.sleep(POLL_S)
