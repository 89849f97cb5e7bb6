"""The stages that a group passes while a round is collected, bound to the plugins the flags name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from slime_core.bound import Bound
from slime_core.engines.client import EngineClient
from slime_core.errors import RolloutError
from slime_core.options import Options
from slime_core.rollout.early import Early
from slime_core.rollout.filters import first_objection, ranked, scored
from slime_core.rollout.generate import Generators, generate_samples
from slime_core.rollout.prompts import Prompts
from slime_core.rollout.reward import Rewards
from slime_core.rollout.tally import Tally
from slime_core.rollout.underway import Underway
from slime_core.types import Drop, Group, Sample, Status

logger = logging.getLogger(__name__)

T = TypeVar("T")

logger = logging.getLogger(__name__)

CANCEL_TIMEOUT_S = 5.0
"""How long a cancelled generator or grader may take to end; one that swallows the cancellation is left behind."""

MAX_ABORTS = 3
"""How often a sample whose generation is aborted, though nobody here asked for it, is continued at once."""

UNFINISHED = (Status.PENDING, Status.ABORTED)


@dataclass(frozen=True)
class Stages:
    """generate -> reward -> dynamic_filter -> over_sampling_filter, for one round or evaluation."""

    args: Options
    engine: EngineClient
    prompts: Prompts
    generators: Generators
    rewards: Rewards
    dynamic_filters: list[Bound]
    over_sampling_filters: list[Bound]
    take_index: Callable[[], int]
    params: dict[str, Any]
    """Sampling parameters."""
    tally: Tally = field(default_factory=Tally)
    underway: Underway = field(default_factory=Underway)
    early: Early = field(default_factory=Early)
    evaluation: bool = False

    def anew(self) -> Stages:
        """The same stages for another round, which counts and is stopped by itself."""
        return replace(self, tally=Tally(), underway=Underway(), early=Early())

    async def run_group(self, group: Group) -> Group:
        """Generate and score clones of the group's samples; the given ones stay as they are.

        Samples that are finished already are kept, ABORTED ones continued. When the round is stopped meanwhile, the
        group comes back as far as it got: some samples PENDING or ABORTED, or finished and not scored.
        """
        parts = await gather(self._run_sample(sample.clone()) for sample in group)
        samples = [sample for part in parts for sample in part]
        whole = all(sample.status not in UNFINISHED for sample in samples)
        if whole and await self.underway.grade(self.rewards.score_group(samples, self.tally)):
            self._count(samples)
        return samples

    async def judge(self, group: Group) -> tuple[Group, Drop | None]:
        """The group without failed samples, and the first objection to it."""
        left, drop = scored(self.args, group)
        return left, drop or await first_objection(self.args, self.dynamic_filters, left)

    def keep(self, group: Group) -> None:
        """Say that a judged group will be trained, so that trainers may look at it early."""
        # a group from a file has the arrays of its images again when it is packed
        whole = all(sample.unexpanded_prompt is None or sample.processed is not None for sample in group)
        if whole and not self.over_sampling_filters:
            self.early.keep(group)

    async def rank(self, groups: list[Group], num_groups: int) -> list[Group]:
        """The groups best first."""
        return await ranked(self.args, self.over_sampling_filters, groups, num_groups)

    async def _run_sample(self, sample: Sample) -> list[Sample]:
        made = [sample]
        if sample.status in UNFINISHED and not self.underway.stopped:
            made = await self._generate(sample)
            self._note_failures(made)
        finished = [one for one in made if one.status not in UNFINISHED]
        if len(finished) == 1:  # the usual case needs no task of its own
            await self.underway.grade(self.rewards.score_sample(finished[0], self.tally))
        elif finished:
            await self.underway.grade(self._score_all(finished))
        self.tally.num_graded += len(finished)
        return made

    async def _score_all(self, samples: list[Sample]) -> None:
        await gather(self.rewards.score_sample(sample, self.tally) for sample in samples)

    async def _generate(self, sample: Sample, num_aborts: int = 0) -> list[Sample]:
        made = await generate_samples(
            self.args,
            self.generators.of(sample),
            self.engine,
            self.underway.requests,
            sample,
            self.params,
            evaluation=self.evaluation,
            take_index=self.take_index,
        )
        if self.underway.stopped or all(one.status is not Status.ABORTED for one in made):
            return made
        if num_aborts == MAX_ABORTS:
            for one in made:
                if one.status is Status.ABORTED:
                    one.fail(f"its generation was aborted {MAX_ABORTS + 1} times")
            return made
        parts = [await self._generate(one, num_aborts + 1) if one.status is Status.ABORTED else [one] for one in made]
        return [one for part in parts for one in part]

    def _note_failures(self, made: list[Sample]) -> None:
        for sample in made:
            if sample.status is Status.FAILED:
                self.tally.failed["generate"] += 1
                if not self.tally.first_failure:
                    self.tally.first_failure = f"generate failed: {sample.failure}"
                    logger.warning(
                        "%s (sample %d); further failures are counted", self.tally.first_failure, sample.index
                    )

    def _count(self, finished: Group) -> None:
        self.tally.num_samples += len(finished)
        rewards = [sample.reward for sample in finished if sample.reward is not None]
        self.tally.reward_sum += sum(rewards)
        self.tally.num_rewards += len(rewards)
        self._stop_when_rewards_fail()

    def _stop_when_rewards_fail(self) -> None:
        """Judged once a full round could not hold so many failures: before, a few may be bad luck."""
        limit = self.args.max_reward_failure_rate
        allowed = limit * max(self.args.rollout_batch_size * self.args.n_samples_per_prompt, self.tally.num_graded)
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
        await ended(tasks)


async def ended(cancelled: Collection[asyncio.Future[Any]]) -> None:
    """Wait for the end of cancelled tasks, but not for ever."""
    if not cancelled:
        return
    done, alive = await asyncio.wait(cancelled, timeout=CANCEL_TIMEOUT_S)
    for task in done:
        if not task.cancelled():
            task.exception()  # seen; what is no longer needed may fail
    if alive:
        logger.warning("%d tasks went on though they were cancelled: a plugin holds back CancelledError", len(alive))
