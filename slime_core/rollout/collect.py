"""Collect one round: draw groups, run them, filter, refill, and give back what is not needed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from slime_core.errors import RolloutError
from slime_core.options import Options
from slime_core.rollout.source import Source
from slime_core.rollout.stages import Stages, ended
from slime_core.types import Drop, Group

logger = logging.getLogger(__name__)

STARTED_AT_A_TIME, CANCELLED_AT_A_TIME = 4, 64
"""Groups started, and tasks ended, between two turns of the event loop, so that thousands do not hold it."""


class Verdict(NamedTuple):
    """A group after its stages."""

    whole: Group
    """As far as it got, failed samples included: what waits for a later round, if it is not needed in this one."""
    left: Group
    """Without the failed samples: what is trained."""
    drop: Drop | None


async def collect(args: Options, source: Source, stages: Stages) -> list[Group]:
    """The `rollout_batch_size` groups to train.

    Groups are drawn `over_sampling_batch_size` at a time, until enough pass the dynamic filters; with an over-sampling
    filter that is `over_sampling_batch_size` groups, of which the best are trained. What is not needed then, finished
    or not, goes back to the buffer, while the round is handed on: see `recalled`.

    Raises:
        RolloutError: when `--max-refills` draws in a row gave no group.
    """
    draw_size = args.over_sampling_batch_size or args.rollout_batch_size
    wanted = draw_size if args.over_sampling_filter else args.rollout_batch_size
    tally = stages.tally
    tally.num_wanted = wanted
    kept: list[Group] = []
    running: dict[asyncio.Task[Verdict], Group] = {}
    drawn: list[Group] = []
    done: asyncio.Queue[asyncio.Task[Verdict]] = asyncio.Queue()
    fruitless_draws = 0
    try:
        while len(kept) < wanted:
            while len(kept) + len(running) < wanted:
                if fruitless_draws > args.max_refills:
                    if running:
                        break  # one of those may yet be kept
                    raise RolloutError(_fruitless_message(fruitless_draws, stages))
                fruitless_draws += 1
                drawn = await source.get_groups(draw_size)
                for number in range(len(drawn)):
                    if number % STARTED_AT_A_TIME == 0:
                        await asyncio.sleep(0)
                    group = drawn.pop(0)
                    task = asyncio.create_task(_run(stages, group))
                    task.add_done_callback(done.put_nowait)
                    running[task] = group
            for task in sorted(await _all_done(done), key=lambda task: running[task][0].group_index):
                _, left, drop = task.result()
                if drop is not None and not (drop.spare and len(kept) + len(running) <= wanted):
                    del running[task]
                    tally.dropped[drop.reason] += 1
                elif len(kept) < wanted:
                    del running[task]
                    kept.append(left)
                    stages.keep(left)
                    fruitless_draws = 0
            tally.num_kept = len(kept)
    except BaseException:
        source.add_groups([*kept, *running.values(), *drawn])
        await _cancel(list(running))
        raise
    if running:
        stages.underway.stop(discard=not args.partial_rollout)
        source.recall(recalled(args, stages, running), len(running))
    try:
        ranking = await stages.rank(kept, args.rollout_batch_size)
    except asyncio.CancelledError:
        source.add_groups(kept)
        raise
    if surplus := wanted - args.rollout_batch_size:
        tally.dropped["over_sampling_filter"] += surplus
    return ranking[: args.rollout_batch_size]


async def recalled(args: Options, stages: Stages, running: dict[asyncio.Task[Verdict], Group]) -> list[Group]:
    """What becomes of the groups that are not needed, after their requests are aborted, in the order of their draw.

    Under --partial-rollout each comes back with the tokens, rewards and versions it has; one whose generator does not
    let go within --abort-timeout-s comes back as it was before the round. Otherwise all come back as they were.
    """
    deadline = time.monotonic() + args.abort_timeout_s
    try:
        await stages.underway.abort(stages.engine, args.abort_timeout_s)
        patience = max(0.0, deadline - time.monotonic()) if args.partial_rollout else 0.0
        done, stuck = await asyncio.wait(running, timeout=patience)
        await _cancel(list(stuck))
    except asyncio.CancelledError:
        await _cancel(list(running))
        raise
    groups = []
    for task, group in sorted(running.items(), key=lambda item: item[1][0].group_index):
        error = None if not task.done() or task.cancelled() else task.exception()
        if error is not None:
            logger.warning("a group that was no longer needed failed: %s; it starts afresh", error)
        usable = task in done and not task.cancelled() and error is None
        groups.append(task.result().whole if usable and args.partial_rollout else group)
    return groups


async def _run(stages: Stages, group: Group) -> Verdict:
    finished = await stages.run_group(group)
    if stages.underway.stopped:
        return Verdict(finished, finished, None)
    return Verdict(finished, *await stages.judge(finished))


async def _all_done(done: asyncio.Queue[asyncio.Task[Verdict]]) -> list[asyncio.Task[Verdict]]:
    """At least one finished task, and every other that has finished by then."""
    tasks = [await done.get()]
    while not done.empty():
        tasks.append(done.get_nowait())
    return tasks


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """End tasks; their requests are aborted by disconnecting, their graders are killed. Bounded in time."""
    for start in range(0, len(tasks), CANCELLED_AT_A_TIME):
        for task in tasks[start : start + CANCELLED_AT_A_TIME]:
            task.cancel()
        await asyncio.sleep(0)
    await ended(tasks)


def _fruitless_message(draws: int, stages: Stages) -> str:
    reasons = ", ".join(f"{reason}: {count}" for reason, count in stages.tally.dropped.most_common())
    return (
        f"{draws} draws in a row gave no group that the filters keep (groups dropped: {reasons or 'none'}). "
        "The prompts may be all too easy or too hard, or a filter too strict; see --dynamic-filter and --max-refills."
    )


async def run_all(groups: Sequence[Group], stages: Stages) -> list[Group]:
    """Every group, generated and scored; for evaluation."""
    stages.tally.num_wanted = len(groups)
    tasks: list[asyncio.Task[Group]] = []
    try:
        for number, group in enumerate(groups):
            if number % STARTED_AT_A_TIME == 0:
                await asyncio.sleep(0)
            tasks.append(asyncio.create_task(_counted(stages, group)))
        return await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)


async def _counted(stages: Stages, group: Group) -> Group:
    finished = await stages.run_group(group)
    stages.tally.num_kept += 1
    return finished
