"""The sessions that are open, the tasks that wait for an agent, and the trajectories that nobody has fetched yet."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from slime_core import Sample, Status
from slime_gateway.session import Session
from slime_gateway.task import Task

KEPT_SESSIONS = 256
"""Ended sessions whose samples are kept for `/get_rollout_data`; older ones are forgotten."""


class Exchange:
    """What the generator and the server share; everything happens on one event loop."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._waiting: dict[str, Task] = {}
        self._offered = asyncio.Event()
        self._finished: deque[list[Sample]] = deque(maxlen=KEPT_SESSIONS)
        self._totals: Counter[str] = Counter()

    def session(self, key: str) -> Session | None:
        """The open session with this key."""
        return self._sessions.get(key)

    def open(self, session: Session) -> None:
        """Let agents talk to a session."""
        self._sessions[session.key] = session
        self._totals["sessions"] += 1

    def close(self, session: Session) -> None:
        """Refuse its key from now on."""
        self._waiting.pop(session.key, None)
        if self._sessions.pop(session.key, None) is not None:
            self._totals += session.counts + session.trajectories.counts

    def offer(self, task: Task) -> None:
        """Let a program that comes by itself take the task, if its session is open."""
        if task.api_key in self._sessions:
            self._waiting[task.api_key] = task
            self._offered.set()

    async def next_task(self, wait_s: float) -> Task | None:
        """The oldest task that waits; None when there is none within `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                while not self._waiting:
                    self._offered.clear()
                    await self._offered.wait()
        except TimeoutError:
            return None
        return self._waiting.pop(next(iter(self._waiting)))

    def keep(self, samples: Sequence[Sample]) -> None:
        """Remember what a session gave, until it is fetched."""
        self._finished.append([sample.clone() for sample in samples])
        self._totals["samples"] += len(samples)
        self._totals["failed"] += sum(sample.status is Status.FAILED for sample in samples)

    def take_finished(self) -> dict[str, Any]:
        """Samples by session, as `Sample.to_dict` writes them, and counts; each is given once."""
        taken: list[list[Sample]] = []
        while self._finished:
            taken.append(self._finished.popleft())
        rewards = [s.reward for samples in taken for s in samples[:1] if s.reward is not None]
        meta = {
            "num_sessions": len(taken),
            "num_groups": len({samples[0].group_index for samples in taken}),
            "num_samples": sum(map(len, taken)),
            "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        }
        return {"data": [[sample.to_dict() for sample in samples] for samples in taken], "meta_info": meta}

    def stats(self) -> dict[str, Any]:
        """Counts since the start, those of open sessions included, and what is under way."""
        totals = Counter(self._totals)
        for session in self._sessions.values():
            totals += session.counts + session.trajectories.counts
        names = ("sessions", "turns", "samples", "failed", "branch", "drift", "retokenized", "undelivered")
        return {
            **{name: totals[name] for name in names},
            "open_sessions": len(self._sessions),
            "waiting_tasks": len(self._waiting),
            "unfetched_sessions": len(self._finished),
        }
