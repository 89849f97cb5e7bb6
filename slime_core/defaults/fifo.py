"""`--buffer-filter fifo`: the groups that wait longest are taken first."""

from slime_core import Group, hookimpl


@hookimpl
def buffer_filter(groups: list[Group], num_groups: int) -> list[Group]:
    """The first `num_groups`."""
    return groups[:num_groups]
