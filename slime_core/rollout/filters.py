"""The filter stages: which finished groups are kept, and which of the kept ones are trained."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from slime_core.bound import Bound, blamed
from slime_core.errors import PluginError
from slime_core.options import Options
from slime_core.types import Drop, Group, Status


def scored(args: Options, group: Group) -> tuple[Group, Drop | None]:
    """The group without its FAILED samples; an objection when fewer than two (or the one wanted) are left."""
    left = [sample for sample in group if sample.status is not Status.FAILED]
    too_few = len(left) < len(group) and len(left) < min(2, args.n_samples_per_prompt)
    return left, Drop("failed") if too_few else None


async def first_objection(args: Options, filters: Sequence[Bound], group: Group) -> Drop | None:
    """The first dynamic filter's Drop; None when all keep the group.

    Raises:
        PluginError: when a filter returns anything else.
    """
    for bound in filters:
        with blamed(bound):
            verdict = await asyncio.to_thread(bound, args=args, samples=group)
        if isinstance(verdict, Drop):
            return verdict
        if verdict is not None:
            raise PluginError(
                f"plugin '{bound.name}': dynamic_filter must return Drop(reason) or None, got {verdict!r}."
            )
    return None


async def ranked(args: Options, filters: Sequence[Bound], groups: list[Group], num_groups: int) -> list[Group]:
    """The groups best first, through every over-sampling filter in turn.

    Raises:
        PluginError: when a filter returns groups it was not given, one twice, or fewer than are needed.
    """
    for bound in filters:
        given = {id(group) for group in groups}
        with blamed(bound):
            result = await asyncio.to_thread(bound, args=args, groups=list(groups), num_groups=num_groups)
        known = isinstance(result, list) and {id(group) for group in result} <= given
        if not known or len({id(group) for group in result}) != len(result) or len(result) < num_groups:
            raise PluginError(
                f"plugin '{bound.name}': over_sampling_filter must return at least {num_groups} of the groups it was "
                f"given, best first and each once."
            )
        groups = result
    return groups
