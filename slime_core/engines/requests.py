"""The requests of one round or evaluation, which are stopped together."""

from __future__ import annotations

import asyncio


class Requests:
    """Request ids under way at the engines. Once stopped, no further one is sent."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self._stop = asyncio.Event()
        self.discarded = False
        """Whether nobody wants what they answer once they are stopped."""
        self.num_tokens = 0
        """Tokens that the engines generated for them."""

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Send no further request; whoever waits for `until_stopped` goes on."""
        self._stop.set()

    async def until_stopped(self) -> None:
        """Return once `stop` was called."""
        await self._stop.wait()
