"""Collect one round: draw groups, run them, filter, refill, and give back what is not needed."""

from __future__ import annotations

import asyncio

from slime_core.errors import RolloutError
from slime_core.options import Options
from slime_core.rollout.source import Source
from slime_core.rollout.stages import Stages
from slime_core.types import Drop, Group


async def collect(args: Options, source: Source, stages: Stages) -> list[Group]:
    """The `rollout_batch_size` groups to train.

    Groups are drawn `over_sampling_batch_size` at a time, until enough pass the dynamic filters; with an over-sampling
    filter that is `over_sampling_batch_size` groups, of which the best are trained. Groups that are finished but not
    needed, and those that are stopped, go back to the buffer as fresh prompts.

    Raises:
        RolloutError: when `--max-refills` draws in a row gave no group.
    """
    draw_size = args.over_sampling_batch_size or args.rollout_batch_size
    wanted = draw_size if args.over_sampling_filter else args.rollout_batch_size
    tally = stages.tally
    tally.num_wanted = wanted
    kept: list[Group] = []
    running: dict[asyncio.Task[tuple[Group, Drop | None]], Group] = {}
    fruitless_draws = 0
    try:
        while len(kept) < wanted:
            while len(kept) + len(running) < wanted:
                if fruitless_draws > args.max_refills:
                    raise RolloutError(_fruitless_message(fruitless_draws, stages))
                fruitless_draws += 1
                for group in await source.get_groups(draw_size):
                    running[asyncio.create_task(_run(stages, group))] = group
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: running[task][0].group_index):
                finished, drop = task.result()
                if drop is not None and not (drop.spare and len(kept) + len(running) <= wanted):
                    del running[task]
                    tally.dropped[drop.reason] += 1
                elif len(kept) < wanted:
                    del running[task]
                    kept.append(finished)
                    fruitless_draws = 0
            tally.num_kept = len(kept)
    finally:
        source.add_groups(list(running.values()))
        await _cancel(running)
    ranking = await stages.rank(kept, args.rollout_batch_size)
    if surplus := wanted - args.rollout_batch_size:
        tally.dropped["over_sampling_filter"] += surplus
    return ranking[: args.rollout_batch_size]


async def _run(stages: Stages, group: Group) -> tuple[Group, Drop | None]:
    return await stages.judge(await stages.run_group(group))


async def _cancel(running: dict[asyncio.Task[tuple[Group, Drop | None]], Group]) -> None:
    """Stop what still runs: requests are aborted by disconnecting, graders are killed."""
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _fruitless_message(draws: int, stages: Stages) -> str:
    reasons = ", ".join(f"{reason}: {count}" for reason, count in stages.tally.dropped.most_common())
    return (
        f"{draws} draws in a row gave no group that the filters keep (groups dropped: {reasons or 'none'}). "
        "The prompts may be all too easy or too hard, or a filter too strict; see --dynamic-filter and --max-refills."
    )
