"""What a round has under way, engine requests and graders, so that it can be stopped when it is no longer needed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from slime_core.engines.client import EngineClient
from slime_core.engines.requests import Requests


class Underway:
    """Requests answer with what they have when they are stopped; graders are cancelled, and their samples graded later.

    Everything is called on the event loop.
    """

    def __init__(self) -> None:
        self.requests = Requests()
        self._graders: set[asyncio.Task[Any]] = set()
        self._recalled: set[asyncio.Task[Any]] = set()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self.requests.stopped

    def stop(self, discard: bool = False) -> None:
        """Send no further request and cancel the graders; requests already sent are for `abort`.

        Args:
            discard: nobody wants what they answer; it is not even parsed.
        """
        self.requests.stop()
        self.requests.discarded = discard
        for task in self._graders:
            task.cancel()
        self._recalled |= self._graders

    async def abort(self, engine: EngineClient, timeout_s: float) -> None:
        """Stop, and return when every request has answered, or after `timeout_s`."""
        await engine.abort(self.requests, timeout_s)

    async def grade(self, grading: Coroutine[Any, Any, None]) -> bool:
        """Run a grading in the current task; False when it was not started, or cancelled, because of `stop`."""
        task = asyncio.current_task()
        if self.stopped or task is None:
            grading.close()
            return False
        self._graders.add(task)
        try:
            await grading
            return True
        except asyncio.CancelledError:
            # `stop` cancels the task once; a second cancellation comes from somebody who means the task itself
            if task not in self._recalled or task.uncancel() > 0:
                raise
            return False
        finally:
            self._graders.discard(task)
