"""How long the phases of a round take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STEP = "step"
"""The name under which `lap` gives the whole round."""


class Timer:
    """Seconds by phase since the last lap; a phase entered again adds up, and phases may nest or overlap."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lap_start = clock()
        self._durations: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body of a `with`, also when it raises."""
        start = self._clock()
        try:
            yield
        finally:
            self._durations[name] = self._durations.get(name, 0.0) + self._clock() - start

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last lap, and `step`: all the time since then. Starts the next lap."""
        now = self._clock()
        durations = {**self._durations, STEP: now - self._lap_start}
        self._lap_start, self._durations = now, {}
        return durations
