"""What a `rollout` plugin returned: checked, and without its failed samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_core.bound import Bound
from slime_core.errors import PluginError, RolloutError
from slime_core.options import Options
from slime_core.rollout.filters import scored
from slime_core.rollout.stages import UNFINISHED
from slime_core.rollout.tally import Tally
from slime_core.types import Group, Sample


def check_groups(rollout: Bound, groups: Any, may_be_empty: bool = False) -> None:
    """Refuse what no `rollout` hook may return.

    Raises:
        PluginError: naming the plugin.
    """
    fine = isinstance(groups, list) and all(isinstance(group, list) and group for group in groups)
    if (
        not fine
        or not (groups or may_be_empty)
        or not all(isinstance(sample, Sample) for group in groups for sample in group)
    ):
        raise PluginError(f"plugin '{rollout.name}': rollout must return a non-empty list of groups of samples.")
    if len({id(sample) for group in groups for sample in group}) < sum(map(len, groups)):
        raise PluginError(f"plugin '{rollout.name}': rollout returned a Sample twice; each is trained once.")
    if unfinished := next((s for group in groups for s in group if s.status in UNFINISHED), None):
        raise PluginError(
            f"plugin '{rollout.name}': rollout returned sample {unfinished.index} {unfinished.status.name}; give such "
            "groups back with source.add_groups."
        )


def without_failed(args: Options, groups: Sequence[Group], tally: Tally) -> list[Group]:
    """The groups without their failed samples, which a `rollout` plugin may leave in; too small ones are dropped.

    Raises:
        RolloutError: when no group is left.
    """
    verdicts = [scored(args, group) for group in groups]
    left = [group for group, drop in verdicts if drop is None]
    if len(left) < len(groups):
        tally.dropped["failed"] += len(groups) - len(left)
    if not left:
        raise RolloutError(f"every group of the round failed. The first failure: {tally.first_failure}")
    return left
