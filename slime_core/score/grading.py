"""Grades rows through the reward stage of training, many at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from slime_core.errors import EngineError
from slime_core.options import Options
from slime_core.plugins import load_plugins
from slime_core.rollout.loop_monitor import LoopMonitor
from slime_core.rollout.reward import Rewards
from slime_core.rollout.tally import Tally
from slime_core.score.rows import Row

if TYPE_CHECKING:
    from slime_core.score.report import Report

ROWS_UNDER_WAY = 256


class NoEngine:
    """Stands where a run has its engine."""

    def __getattr__(self, name: str) -> Any:
        raise EngineError("this reward asks an engine, which is there in training only")


async def graded(args: Options, rows: Iterator[Row], report: Report) -> AsyncIterator[Row]:
    """The rows in order, each as soon as it and those before it are graded; notes speed and stalls in the report."""
    plugins = load_plugins(args, [choice.reference for choice in args.reward])
    rewards = Rewards(args, plugins, NoEngine())  # type: ignore[arg-type]
    under_way: deque[asyncio.Task[Row]] = deque()
    try:
        with LoopMonitor(plugins) as monitor:
            for row in rows:
                under_way.append(asyncio.create_task(_grade(rewards, row)))
                if len(under_way) >= ROWS_UNDER_WAY:
                    yield await under_way.popleft()
            while under_way:
                yield await under_way.popleft()
            report.longest_stall_s = monitor.take_longest_stall()
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        rewards.close()
        plugins.close()
        await asyncio.sleep(0)  # what `close` left to the loop


async def _grade(rewards: Rewards, row: Row) -> Row:
    tally = Tally(first_failure="counted in the report")
    await asyncio.gather(*(rewards.score_sample(sample, tally) for sample in row.samples))
    await rewards.score_group(row.samples, tally)
    return row
