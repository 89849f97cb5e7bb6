"""Waiting for what comes in its own time, instead of sleeping and hoping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def until(condition: Callable[[], Result], timeout_s: float = 60.0) -> Result:
    """What a condition returns once it is true; fails when that takes too long. The event loop goes on."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"nothing happened within {timeout_s} s"
        await asyncio.sleep(0.01)
    return result


def wait_until(condition: Callable[[], Result], timeout_s: float = 60.0) -> Result:
    """As `until`, where no event loop runs."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"nothing happened within {timeout_s} s"
        time.sleep(0.01)
    return result
