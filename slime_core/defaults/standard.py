"""`--rollout standard`: draw, generate, reward, filter and refill until the round is full."""

from typing import Any

from slime_core import Group, hookimpl
from slime_core.rollout.collect import collect


@hookimpl
async def rollout(args: Any, source: Any, stages: Any) -> list[Group]:
    """The groups of one round."""
    return await collect(args, source, stages)
