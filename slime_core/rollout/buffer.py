"""The groups that wait for a later round: given back, taken by the buffer filter, too old ones made fresh prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from slime_core.bound import Bound, blamed
from slime_core.errors import PluginError
from slime_core.options import Options
from slime_core.rollout.staleness import has_something_to_train, mask_older, oldest_version
from slime_core.types import Group, Sample


class Buffer:
    """Groups in the order in which they came, those still being recalled from a round included."""

    def __init__(self, args: Options, buffer_filter: Bound) -> None:
        self._args = args
        self._filter = buffer_filter
        self._groups: list[Group] = []
        self._recalls: dict[asyncio.Task[list[Group]], int] = {}
        self._prompts: dict[int, Sample] = {}
        self.num_restarted = 0
        """Groups that were too old and became fresh prompts."""

    def __len__(self) -> int:
        return len(self._groups) + sum(self._recalls.values())

    def add(self, groups: Iterable[Group]) -> None:
        """Let finished, partial or fresh groups wait."""
        self._groups.extend(groups)

    def recall(self, groups: Coroutine[Any, Any, list[Group]], num_groups: int) -> None:
        """Let groups wait that are still being called back from the engines."""
        self._recalls[asyncio.create_task(groups)] = num_groups

    async def settle(self) -> None:
        """Return when every recalled group is here."""
        while self._recalls:
            task = next(iter(self._recalls))
            await asyncio.wait([task])  # whoever waits may be cancelled; the recall goes on
            if self._recalls.pop(task, None) is not None:
                self._groups.extend(task.result())

    async def close(self) -> None:
        """End recalls that are under way, for good."""
        for task in self._recalls:
            task.cancel()
        await asyncio.gather(*self._recalls, return_exceptions=True)

    def remember(self, prompt: Sample) -> None:
        """Keep the pristine prompt of a group, numbered as the group's first sample, while the group is not trained."""
        self._prompts[prompt.group_index] = prompt

    async def take(self, num_groups: int, trained_version: int, version: int) -> list[Group]:
        """At most `num_groups` of the waiting groups, as the buffer filter chooses.

        A group with a token that lags `trained_version`, the weights to be trained, by more than --max-staleness
        versions is a fresh prompt again; under --mask-offpolicy-in-partial-rollout older tokens than `version`, the
        engines', are masked instead, and a group is a fresh prompt when nothing else is left in it.

        Raises:
            PluginError: when the filter returns anything but such groups.
        """
        await self.settle()
        self._groups = [self._usable(group, trained_version, version) for group in self._groups]
        if not self._groups or not num_groups:
            return []
        with blamed(self._filter):
            chosen = await asyncio.to_thread(
                self._filter, args=self._args, groups=list(self._groups), num_groups=num_groups
            )
        waiting = {id(group) for group in self._groups}
        taken = {id(group) for group in chosen} if isinstance(chosen, list) else {0}
        if not taken <= waiting or len(taken) != len(chosen) or len(chosen) > num_groups:
            what = f"{len(chosen)}" if isinstance(chosen, list) else type(chosen).__name__
            raise PluginError(
                f"plugin '{self._filter.name}': buffer_filter must return a list of at most {num_groups} of the groups "
                f"it was given, each once; it returned {what}."
            )
        self._groups = [group for group in self._groups if id(group) not in taken]
        return list(chosen)

    def forget_trained(self) -> None:
        """Drop the pristine prompts of groups that no longer wait; called between rounds."""
        waiting = {group[0].group_index for group in self._groups if group}
        self._prompts = {index: prompt for index, prompt in self._prompts.items() if index in waiting}

    def contents(self, ahead: Sequence[Group] = ()) -> tuple[list[Group], list[Sample]]:
        """The waiting groups, behind those of `ahead`, and the pristine prompts that are known of them."""
        groups = [*ahead, *self._groups]
        known = [self._prompts.get(group[0].group_index) for group in groups if group]
        return groups, [prompt for prompt in known if prompt is not None]

    def restore(self, groups: Iterable[Group], prompts: Iterable[Sample]) -> None:
        """Go on from `contents`."""
        self._groups = list(groups)
        self._prompts = {prompt.group_index: prompt for prompt in prompts}

    def _usable(self, group: Group, trained_version: int, version: int) -> Group:
        if self._args.mask_offpolicy_in_partial_rollout:
            mask_older(group, version)
            if has_something_to_train(group):
                return group
        else:
            oldest = oldest_version(group)
            if oldest is None or trained_version - oldest <= self._args.max_staleness:
                return group
        self.num_restarted += 1
        return self._fresh(group)

    def _fresh(self, group: Group) -> Group:
        """The group as it was drawn; of a group from elsewhere, each rollout's first sample without its response."""
        prompt = self._prompts.get(group[0].group_index)
        if prompt is not None:
            return members(prompt, self._args.n_samples_per_prompt)
        firsts = {sample.rollout_index: sample for sample in reversed(group)}
        fresh = [sample.clone() for sample in group if firsts[sample.rollout_index] is sample]
        for sample in fresh:
            sample.restart()
        return fresh


def members(prompt: Sample, num_samples: int) -> Group:
    """Clones of a numbered prompt, with consecutive indices from the prompt's own."""
    group = []
    for position in range(num_samples):
        sample = prompt.clone()
        sample.index = sample.rollout_index = prompt.index + position
        sample.session_id = sample.session_id or f"{sample.group_index}-{sample.index}"
        group.append(sample)
    return group
