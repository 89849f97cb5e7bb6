"""`--rollout standard`: draw, generate, reward, filter and refill until the round is full; an evaluation runs all."""

from typing import Any

from slime_core import Group, hookimpl
from slime_core.rollout.collect import collect, run_all


@hookimpl
async def rollout(args: Any, source: Any, stages: Any, evaluation: bool) -> list[Group]:
    """The groups of one round, or every group of an evaluation data set."""
    return await (run_all(source.groups, stages) if evaluation else collect(args, source, stages))
