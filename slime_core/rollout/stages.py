"""The stages that a group passes while a round is collected, bound to the plugins the flags name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from slime_core.bound import Bound
from slime_core.engines.client import EngineClient
from slime_core.errors import RolloutError
from slime_core.options import Options
from slime_core.rollout.filters import first_objection, ranked, scored
from slime_core.rollout.generate import generate_samples, sampling_params
from slime_core.rollout.reward import Rewards
from slime_core.rollout.tally import Tally
from slime_core.types import Drop, Group, Sample

T = TypeVar("T")


@dataclass(frozen=True)
class Stages:
    """generate -> reward -> dynamic_filter -> over_sampling_filter, for one round or evaluation."""

    args: Options
    engine: EngineClient
    generate: Bound
    rewards: Rewards
    dynamic_filters: list[Bound]
    over_sampling_filters: list[Bound]
    take_index: Callable[[], int]
    tally: Tally
    evaluation: bool = False

    def with_tally(self, tally: Tally) -> Stages:
        """The same stages, counting into another tally."""
        return replace(self, tally=tally)

    async def run_group(self, group: Group, params: dict[str, Any] | None = None) -> Group:
        """Generate and score clones of the group's samples; the given ones stay as they are.

        Args:
            params: sampling parameters, those of the flags by default.
        """
        chosen = sampling_params(self.args) if params is None else params
        parts = await gather(self._run_sample(sample.clone(), chosen) for sample in group)
        finished = [sample for part in parts for sample in part]
        await self.rewards.score_group(finished, self.tally)
        self._count(finished)
        return finished

    async def judge(self, group: Group) -> tuple[Group, Drop | None]:
        """The group without failed samples, and the first objection to it."""
        left, drop = scored(self.args, group)
        return left, drop or await first_objection(self.args, self.dynamic_filters, left)

    async def rank(self, groups: list[Group], num_groups: int) -> list[Group]:
        """The groups best first."""
        return await ranked(self.args, self.over_sampling_filters, groups, num_groups)

    async def _run_sample(self, sample: Sample, params: dict[str, Any]) -> list[Sample]:
        made = await generate_samples(
            self.args,
            self.generate,
            self.engine,
            sample,
            params,
            evaluation=self.evaluation,
            take_index=self.take_index,
        )
        if len(made) == 1:  # the usual case needs no task of its own
            await self.rewards.score_sample(made[0], self.tally)
        else:
            await gather(self.rewards.score_sample(one, self.tally) for one in made)
        return made

    def _count(self, finished: Group) -> None:
        self.tally.num_samples += len(finished)
        rewards = [sample.reward for sample in finished if sample.reward is not None]
        self.tally.reward_sum += sum(rewards)
        self.tally.num_rewards += len(rewards)
        self._stop_when_rewards_fail()

    def _stop_when_rewards_fail(self) -> None:
        """More failures than a full round may have: the grader is broken, and refilling would go on for ever."""
        limit = self.args.max_reward_failure_rate
        allowed = limit * self.args.rollout_batch_size * self.args.n_samples_per_prompt
        num_failed = sum(self.tally.failed.values())
        if not self.evaluation and num_failed > allowed:
            raise RolloutError(
                f"{num_failed} samples of this round have no reward, more than --max-reward-failure-rate {limit:g} "
                f"allows. The first failure: {self.tally.first_failure}"
            )


async def gather(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Like asyncio.gather, but the first error, or a cancellation, ends the others before it is raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
