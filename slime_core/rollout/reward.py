"""The reward stage: every named reward on every sample, weighted and summed; a failed reward is never a reward of 0."""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime_core.bound import Bound
from slime_core.engines.client import EngineClient
from slime_core.errors import DataError, PluginError
from slime_core.options import Options, RewardChoice
from slime_core.plugins import Plugins
from slime_core.rollout.reward_pool import RewardFailure, RewardPool
from slime_core.rollout.tally import Tally
from slime_core.types import Group, Sample, Status

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Grader:
    """One named reward, ready to be called."""

    choice: RewardChoice
    bound: Bound

    @property
    def name(self) -> str:
        """The plugin's plain name, under which its rewards are kept and logged."""
        return self.bound.name

    @property
    def whole_group(self) -> bool:
        """Whether it grades groups rather than samples."""
        return self.bound.hook == "group_reward"


def bind_graders(choices: Iterable[RewardChoice], plugins: Plugins) -> list[Grader]:
    """The named rewards, as `reward` where the plugin has it, else as `group_reward`."""
    graders = []
    for choice in choices:
        plugins.load(choice.reference)
        hook = "reward" if plugins.implements("reward", choice.name) else "group_reward"
        graders.append(Grader(choice, plugins.bind(hook, choice.reference)))
    return graders


class Rewards:
    """Grades samples and groups with the graders that apply to them."""

    def __init__(self, args: Options, plugins: Plugins, engine: EngineClient) -> None:
        self._args = args
        self._plugins = plugins
        self._graders = bind_graders(args.reward, plugins)
        self._field: str | None = args.reward_field
        self._engine = engine
        of_datasets = bind_graders((choice for entry in args.eval_data for choice in entry.reward or ()), plugins)
        graders = {grader.choice.reference: grader for grader in [*self._graders, *of_datasets]}
        in_workers = [reference for reference, grader in graders.items() if not grader.bound.is_async]
        wrapping = plugins.wrapping(["reward", "group_reward"])
        self._pool = RewardPool(args, [*in_workers, *wrapping]) if in_workers else None

    def only(self, choices: Sequence[RewardChoice]) -> Rewards:
        """These rewards instead, as an evaluation data set names them; the worker processes are shared."""
        rewards = copy.copy(self)
        rewards._graders, rewards._field = bind_graders(choices, self._plugins), None
        return rewards

    async def score_sample(self, sample: Sample, tally: Tally) -> None:
        """Run the per-sample rewards of a finished sample; one that a generator filled is kept."""
        if sample.status in (Status.ABORTED, Status.FAILED) or sample.shares_reward or sample.reward is not None:
            return
        for grader in self._graders_of(sample):
            if grader.whole_group or sample.status is Status.FAILED or grader.name in sample.rewards:
                continue
            try:
                _keep(sample, grader, await self._grade(grader, {"sample": sample}))
            except RewardFailure as failure:
                _fail([sample], grader, str(failure), tally)

    async def score_group(self, group: Group, tally: Tally) -> None:
        """Run the group rewards of a finished group, then sum up, and give the sums to the samples that share them."""
        finished = [s for s in group if s.status in (Status.COMPLETED, Status.TRUNCATED)]
        unscored = [s for s in finished if s.reward is None]
        open_samples = [s for s in unscored if not s.shares_reward]
        for grader in self._graders:
            if not grader.whole_group:
                continue
            graded = [
                s
                for s in finished
                if not s.shares_reward and s.status is not Status.FAILED and grader in self._graders_of(s)
            ]
            wanting = [s for s in graded if s.reward is None and grader.name not in s.rewards]
            if not wanting:
                continue
            try:
                results = await self._grade(grader, {"samples": graded})
                if not isinstance(results, list | tuple) or len(results) != len(graded):
                    what = f"{len(results)} rewards" if isinstance(results, list | tuple) else type(results).__name__
                    raise RewardFailure(f"returned {what} for a group of {len(graded)} samples")
                for sample, result in zip(graded, results, strict=True):
                    if sample.reward is None and grader.name not in sample.rewards:
                        _keep(sample, grader, result)
            except RewardFailure as failure:
                _fail(wanting, grader, str(failure), tally)
        for sample in open_samples:
            weights = {grader.name: grader.choice.weight for grader in self._graders_of(sample)}
            if weights and sample.status is not Status.FAILED:
                sample.reward = sum(weight * sample.rewards[name] for name, weight in weights.items())
        _share([s for s in unscored if s.shares_reward], group)

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.close()

    def _graders_of(self, sample: Sample) -> list[Grader]:
        """All of them, or with --reward-field the one that the row names and those marked '+'."""
        field = self._field
        if field is None:
            return self._graders
        wanted = sample.metadata.get(field)
        plain = [grader.name for grader in self._graders if not grader.choice.always]
        if wanted not in plain:
            raise DataError(
                f"a row of data set '{sample.dataset}' has metadata {field}={wanted!r}, which is none of the rewards "
                f"named without '+': {', '.join(plain)}."
            )
        return [grader for grader in self._graders if grader.choice.always or grader.name == wanted]

    async def _grade(self, grader: Grader, subject: dict[str, Any]) -> Any:
        if grader.bound.is_async:
            return await self._grade_here(grader, subject)
        if self._pool is None:
            raise PluginError(f"plugin '{grader.name}' needs a worker process, and none was started.")
        light = {name: _without_arrays(value) for name, value in subject.items()}
        return await self._pool.grade(grader.bound.hook, grader.choice.reference, light)

    async def _grade_here(self, grader: Grader, subject: dict[str, Any]) -> Any:
        timeout_s = self._args.reward_timeout_s
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await grader.bound(args=self._args, engine=self._engine, **subject)
        except Exception as error:
            if limit.expired():
                raise RewardFailure(f"took longer than {timeout_s:g} s and was cancelled") from None
            raise RewardFailure(f"{type(error).__name__}: {error}") from error


def _without_arrays(subject: Any) -> Any:
    """A sample, or each of a list, without what a processor made of its images: no grader needs it, and it is large."""
    if isinstance(subject, list):
        return [_without_arrays(sample) for sample in subject]
    return subject if subject.processed is None else replace(subject, processed=None)


def _keep(sample: Sample, grader: Grader, result: Any) -> None:
    """Note a reward; of a dict the key `reward` counts, `turn_rewards` is kept by turn, and the others are logged.

    Raises:
        RewardFailure: when it is not a finite number, or a dict of such.
    """
    name = grader.name
    entries = dict(result) if isinstance(result, dict) else {"reward": result}
    by_turn = entries.pop("turn_rewards", None)
    if "reward" not in entries:
        raise RewardFailure(f"returned a dict without the key 'reward': {sorted(map(str, entries))}")
    for key, value in entries.items():
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise RewardFailure(f"returned {value!r} where a finite number is needed")
        sample.rewards[name if key == "reward" else f"{name}/{key}"] = float(value)
    if by_turn is not None:
        _add_turn_rewards(sample, grader.choice.weight, by_turn)


def _add_turn_rewards(sample: Sample, weight: float, by_turn: Any) -> None:
    num_turns = len(sample.turn_ends)
    if not isinstance(by_turn, list | tuple) or len(by_turn) != num_turns or not num_turns:
        what = f"{len(by_turn)}" if isinstance(by_turn, list | tuple) else type(by_turn).__name__
        raise RewardFailure(f"returned {what} as turn_rewards for a sample of {num_turns} turns")
    if not all(isinstance(value, numbers.Real) and math.isfinite(value) for value in by_turn):
        raise RewardFailure(f"returned {by_turn!r} as turn_rewards where finite numbers are needed")
    before = sample.turn_rewards or [0.0] * num_turns
    sample.turn_rewards = [old + weight * float(new) for old, new in zip(before, by_turn, strict=True)]


def _share(sharing: Group, group: Group) -> None:
    """The reward of the graded sample of the same rollout to those that share it; without one they fail with it."""
    graded = {sample.rollout_index: sample for sample in group if not sample.shares_reward}
    for sample in sharing:
        source = graded.get(sample.rollout_index)
        if source is None:
            sample.fail("shares a reward, but its rollout has no sample that is graded")
        elif source.status is Status.FAILED:
            sample.fail(source.failure or "the sample whose reward it shares failed")
        else:
            sample.reward = source.reward


def _fail(samples: Group, grader: Grader, reason: str, tally: Tally) -> None:
    for sample in samples:
        sample.fail(f"reward '{grader.name}' {reason}")
    if not tally.first_failure:
        tally.first_failure = f"reward '{grader.name}' failed: {reason}"
        logger.warning("%s (sample %d); further failures are counted", tally.first_failure, samples[0].index)
    tally.failed[grader.name] += len(samples)
