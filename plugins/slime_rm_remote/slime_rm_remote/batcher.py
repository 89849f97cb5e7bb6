"""Gathers single items into batches: full ones go at once, others after a short wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

Send: TypeAlias = Callable[[list[Any]], Awaitable[Sequence[Any]]]


class Batcher:
    """`send` gets lists of at most `size` items and gives one result an item, in order."""

    def __init__(self, size: int, wait_s: float, send: Send) -> None:
        self._size = size
        self._wait_s = wait_s
        self._send = send
        self._waiting: list[tuple[Any, asyncio.Future[Any]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task[None]] = set()

    async def submit(self, item: Any) -> Any:
        """The item's result; an error of `send` reaches every item of its batch."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((item, future))
        if len(self._waiting) >= self._size:
            self._flush()
        elif self._timer is None:
            self._timer = loop.call_later(self._wait_s, self._flush)
        return await future

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # an item whose caller has gone (cancelled) is not sent
        batch, self._waiting = [(i, f) for i, f in self._waiting if not f.done()], []
        if batch:
            task = asyncio.create_task(self._send_batch(batch))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send_batch(self, batch: list[tuple[Any, asyncio.Future[Any]]]) -> None:
        try:
            results = await self._send([item for item, _ in batch])
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), result in zip(batch, results, strict=True):
            if not future.done():
                future.set_result(result)
