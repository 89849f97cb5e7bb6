"""Worker processes for plain `def` rewards: a grader that hangs, crashes or eats memory harms only itself."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import TimeoutError as GraderTimeout
from typing import Any

from pebble import ProcessExpired, ProcessPool

from slime_core.options import Options
from slime_core.rollout import reward_worker


class RewardFailure(Exception):
    """Why a grader gave no reward."""


class RewardPool:
    """Grades in `--reward-workers` processes, each call killed after `--reward-timeout-s`."""

    def __init__(self, args: Options, references: Sequence[str]) -> None:
        # Workers are forked from a clean server process that has the code imported: a killed one is replaced in ms.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", reward_worker.__name__])
        self._timeout_s: float = args.reward_timeout_s
        self._pool = ProcessPool(
            max_workers=args.reward_workers,
            context=context,
            initializer=reward_worker.start,
            initargs=(args, list(references), int(args.reward_memory_gib * 2**30)),
        )
        self._pool.schedule(reward_worker.ready)  # the workers start now, not with the first sample

    async def grade(self, hook: str, reference: str, subject: dict[str, Any]) -> Any:
        """The result of a plugin's hook. Cancelling the call kills the grader.

        Raises:
            RewardFailure: when the plugin raised, took too long, or its process died.
        """
        future = self._pool.schedule(reward_worker.grade, args=[hook, reference, subject], timeout=self._timeout_s)
        try:
            result, failure = await asyncio.wrap_future(future)
        except GraderTimeout:
            raise RewardFailure(f"took longer than {self._timeout_s:g} s and was killed") from None
        except ProcessExpired as expired:
            raise RewardFailure(f"its worker process died with exit code {expired.exitcode}") from None
        if failure is not None:
            raise RewardFailure(failure)
        return result

    def close(self) -> None:
        """Kill the workers."""
        self._pool.stop()
        self._pool.join()
