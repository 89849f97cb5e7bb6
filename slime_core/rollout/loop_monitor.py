"""Watches the event loop and names the plugin that holds it."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from types import FrameType, TracebackType

from slime_core.plugins import Plugins

logger = logging.getLogger(__name__)

LIMIT_S = 0.1
"""A call that holds the loop longer is reported when it ends."""
STUCK_S = 5.0
"""One that holds it longer than this is reported at once: it may never end."""


class LoopMonitor:
    """A thread that asks the running loop for a sign of life and, when none comes, looks at where it is stuck."""

    def __init__(self, plugins: Plugins) -> None:
        self._plugin_files = plugin_files(plugins)
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._alive = threading.Event()
        self._stopped = threading.Event()
        self._reported: set[str] = set()
        self._longest_stall_s = 0.0
        self._thread = threading.Thread(target=self._watch, name="loop monitor", daemon=True)

    def __enter__(self) -> LoopMonitor:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching."""
        self._stopped.set()
        self._thread.join()

    def take_longest_stall(self) -> float:
        """Seconds of the longest stall since the last call."""
        longest, self._longest_stall_s = self._longest_stall_s, 0.0
        return longest

    def _answer(self, asked: float) -> None:
        """The loop's sign of life. It measures the stall itself: a round may end before the thread is awake."""
        if (stall_s := time.monotonic() - asked) > LIMIT_S:
            self._longest_stall_s = max(self._longest_stall_s, stall_s)
        self._alive.set()

    def _watch(self) -> None:
        while not self._stopped.wait(LIMIT_S / 2):
            self._alive.clear()
            asked = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(self._answer, asked)
            except RuntimeError:  # the loop is closed
                return
            if self._alive.wait(LIMIT_S):
                continue
            frame = sys._current_frames().get(self._loop_thread)
            culprit = self._culprit(frame)
            stuck = False
            while not self._alive.wait(LIMIT_S) and not self._stopped.is_set():
                if not stuck and time.monotonic() - asked > STUCK_S:
                    stuck = True
                    logger.warning(
                        "%s has held the event loop for %.0f s and goes on.", culprit or "something", STUCK_S
                    )
            self._report(time.monotonic() - asked, culprit)

    def _report(self, stall_s: float, culprit: str | None) -> None:
        if culprit is not None and culprit not in self._reported:
            self._reported.add(culprit)
            logger.warning(
                "%s held the event loop for %.0f ms; make blocking work a plain `def` hook, or await it.",
                culprit,
                1000 * stall_s,
            )

    def _culprit(self, frame: FrameType | None) -> str | None:
        """The innermost frame of a plugin's own code, as text; None when no plugin is on the stack."""
        for caller, line in traceback.walk_stack(frame) if frame else []:
            name = self._plugin_files.get(caller.f_code.co_filename)
            if name is not None:
                return f"plugin '{name}' ({caller.f_code.co_name}, {caller.f_code.co_filename}:{line})"
        return None


def plugin_files(plugins: Plugins) -> Mapping[str, str]:
    """Source file -> the plugin whose hooks it holds."""
    return {
        impl.function.__code__.co_filename: name for name in plugins.loaded for impl in plugins.hooks_of(name).values()
    }
