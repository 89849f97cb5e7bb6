"""The rollout side of a run: one object that collects rounds, evaluates, and saves what it would need to go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from slime_core.bound import blamed
from slime_core.engines.client import EngineClient
from slime_core.engines.connect import connect
from slime_core.engines.parallel import sizes
from slime_core.errors import CheckpointError, DataError
from slime_core.options import Options, hook_choices
from slime_core.plugins import load_plugins, plugin_name
from slime_core.rollout.collected import check_groups, without_failed
from slime_core.rollout.convert import convert, split
from slime_core.rollout.early import Found
from slime_core.rollout.evaluate import evaluate, open_eval_datasets
from slime_core.rollout.generate import Generators, sampling_params
from slime_core.rollout.loop_monitor import LoopMonitor
from slime_core.rollout.prompts import Prompts
from slime_core.rollout.reward import Rewards
from slime_core.rollout.sample_file import read_groups, write_groups
from slime_core.rollout.source import Source
from slime_core.rollout.stages import Stages
from slime_core.rollout.tally import Tally
from slime_core.tracking.flops import ModelFlops
from slime_core.tracking.metrics import rollout_metrics
from slime_core.tracking.report import run_dir
from slime_core.types import Group, Shard

ROLLOUT_HOOKS = (
    "get_samples",
    "generate",
    "reward",
    "dynamic_filter",
    "over_sampling_filter",
    "buffer_filter",
    "convert_train_data",
    "rollout",
)
"""The hooks whose plugins this process loads."""

STATE_FILE, WAITING_FILE, PROMPTS_FILE = "rollout.json", "waiting.parquet", "prompts.parquet"
SAMPLES_DIR = "samples"
"""In the run directory: the trained samples of every round, under --save-samples."""


@dataclass(frozen=True)
class Round:
    """What one round gives the trainers and the trackers."""

    shards: list[Shard]
    metrics: dict[str, float]


class RolloutManager:
    """get_samples -> generate -> reward -> filters -> convert, with the plugins that the flags name.

    Built and used inside a running event loop.
    """

    def __init__(
        self,
        args: Options,
        router_url: str,
        worker_urls: Sequence[str],
        num_ranks: int,
        frozen: Mapping[str, EngineClient] | None = None,
    ) -> None:
        self._args = args
        self._num_ranks = num_ranks
        self._num_devices = max(1, len(worker_urls)) * sizes(args).num_gpus
        choices = hook_choices(args)
        self._plugins = load_plugins(args, [name for hook in ROLLOUT_HOOKS for name in choices[hook]])
        bind = self._plugins.bind
        self.engine = connect(args, router_url, worker_urls, frozen)
        self._prompts = Prompts(args, self.engine.tokenizer)
        self.source = Source(
            args,
            bind("get_samples", args.get_samples),
            bind("buffer_filter", args.buffer_filter),
            self.engine,
            self._prompts,
        )
        self._eval_datasets = open_eval_datasets(args, bind)
        self._rollout = bind("rollout", args.rollout)
        self._eval_rollout = bind("rollout", args.eval_rollout)
        self._flops = ModelFlops.of(args.model) if args.balance_by == "flops" else None
        self._convert = bind("convert_train_data", args.convert_train_data)
        self._rewards = Rewards(args, self._plugins, self.engine)
        self._stages = Stages(
            args=args,
            engine=self.engine,
            prompts=self._prompts,
            generators=Generators(
                args.generate_field, {plugin_name(name): bind("generate", name) for name in args.generate}
            ),
            rewards=self._rewards,
            dynamic_filters=[bind("dynamic_filter", name) for name in args.dynamic_filter],
            over_sampling_filters=[bind("over_sampling_filter", name) for name in args.over_sampling_filter],
            take_index=self.source.take_index,
            params=sampling_params(args),
        )
        self._monitor = LoopMonitor(self._plugins)
        self._monitor.__enter__()
        self.num_trained = 0
        self.num_dropped = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        """Rounds and evaluations under way."""
        self._collected: tuple[int, list[Group]] = (-1, [])
        self._collecting = False
        self._evaluation: Tally | None = None

    async def rollout(self, step: int, version: int | None = None) -> Round:
        """Collect the round of `step` and split it for the trainer ranks.

        Args:
            version: of the engines' weights; by default the step's own, as without --max-staleness.
        """
        started = time.monotonic()
        trained_version = step if self._num_ranks else 0
        # without trainers no weights are ever sent
        version = trained_version if version is None or not self._num_ranks else version
        await self.source.begin_round(trained_version, version)
        self._collecting = True
        stages = self._stages = self._stages.anew()
        with self._under_way():
            groups = await self._collect(step, stages)
            collected = time.monotonic()
            try:
                await stages.early.close()
                shards, metrics = await asyncio.to_thread(self._packed, step, groups, stages, trained_version)
            except asyncio.CancelledError:
                self.num_dropped += stages.tally.dropped.total()
                self.source.add_groups(groups)
                raise
        self._collected, self._collecting = (step, groups), False
        self.num_trained += len(groups)
        self.num_dropped += stages.tally.dropped.total()
        tokens_per_s = stages.underway.requests.num_tokens / (collected - started)
        metrics |= {
            "data/drawn": float(self.source.num_drawn),
            "data/trained": float(self.num_trained),
            "data/dropped": float(self.num_dropped),
            "data/waiting": float(self.source.num_waiting),
            "data/restarted": float(self.source.num_restarted),
            "data/too_long": float(self.source.num_too_long),
            "engines/retries": float(self.engine.take_num_retries()),
            "perf/collect_s": collected - started,
            "perf/rollout_tokens_per_s": tokens_per_s,
            "perf/rollout_tokens_per_s_per_device": tokens_per_s / self._num_devices,
            "perf/convert_s": time.monotonic() - collected,
            "perf/event_loop_stall_max_s": self._monitor.take_longest_stall(),
        }
        return Round(shards, metrics)

    async def take_early(self) -> list[Shard] | None:
        """A shard a rank of the groups that are new and will be trained in the round under way; None without any."""
        batch = self._stages.early.take() if self._collecting else None
        return None if batch is None else await asyncio.to_thread(split, batch, self._num_ranks, 1)

    def note_early(self, answers: Sequence[Found]) -> None:
        """What the ranks found about the last `take_early`."""
        self._stages.early.note(answers)

    async def evaluate(self, step: int = 0) -> dict[str, float]:
        """Metrics of every evaluation data set, after `step` trained rounds."""
        started = time.monotonic()
        metrics: dict[str, float] = {}
        with self._under_way():
            for dataset in self._eval_datasets:
                stages = self._stages.anew()
                self._evaluation = stages.tally
                metrics |= await evaluate(self._args, dataset, self._eval_rollout, stages, step)
        self._evaluation = None
        return metrics | {"perf/eval_s": time.monotonic() - started}

    async def abandon(self) -> None:
        """Give up the round and the evaluation under way. Groups that were drawn wait for a later round."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def progress(self) -> Tally:
        """The counts of the round under way, or of the evaluation where that is all that goes on."""
        return self._evaluation if self._evaluation is not None and not self._collecting else self._stages.tally

    async def engines_free(self) -> None:
        """Return when the requests that the last round did not need are gone, so that no new weights meet them."""
        await self.engine.aborted()

    async def save(self, directory: Path, num_rounds: int) -> None:
        """Write the source, its buffer and the counters as they are after `num_rounds` trained rounds.

        No round may be under way; one that is collected already and not yet trained is saved as waiting groups.

        Raises:
            CheckpointError: when a plugin keeps what JSON cannot hold.
        """
        await self.source.settle()
        step, groups = self._collected
        ahead = groups if step >= num_rounds else []
        waiting, prompts = self.source.waiting(ahead)
        state = {
            "source": self.source.state_dict(),
            "num_trained": self.num_trained - len(ahead),
            "num_dropped": self.num_dropped,
        }
        try:
            (directory / STATE_FILE).write_bytes(orjson.dumps(state, option=orjson.OPT_SERIALIZE_NUMPY))
            write_groups(directory / WAITING_FILE, waiting)
            write_groups(directory / PROMPTS_FILE, [[prompt] for prompt in prompts])
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the rollout side cannot be saved: {error}. What get_samples keeps in `state`, and labels and "
                "metadata of samples, must be JSON-able."
            ) from None

    def load(self, directory: Path) -> None:
        """Go on from `save`.

        Raises:
            CheckpointError: when a file cannot be read.
        """
        try:
            state: dict[str, Any] = orjson.loads((directory / STATE_FILE).read_bytes())
            prompts = [prompt for group in read_groups(directory / PROMPTS_FILE) for prompt in group]
            self.source.load_state_dict(state["source"], read_groups(directory / WAITING_FILE), prompts)
            self.num_trained, self.num_dropped = state["num_trained"], state["num_dropped"]
        except (OSError, ValueError, KeyError, DataError) as error:
            raise CheckpointError(f"the rollout state in {directory} cannot be read: {error}") from error

    async def close(self) -> None:
        """End what is under way and the reward workers; close connections and plugins."""
        self._monitor.close()
        await self.source.close()
        self._rewards.close()
        self._plugins.close()
        await self.engine.close()

    async def _collect(self, step: int, stages: Stages) -> list[Group]:
        """What the `rollout` plugin collects, checked, numbered, without failed samples."""
        try:
            with blamed(self._rollout):
                groups = await self._rollout(
                    args=self._args,
                    step=step,
                    source=self.source,
                    engine=self.engine,
                    stages=stages,
                    evaluation=False,
                )
        except asyncio.CancelledError:
            self.num_dropped += stages.tally.dropped.total()
            raise
        check_groups(self._rollout, groups)
        self.source.adopt([group for group in groups if group[0].group_index < 0])
        return without_failed(self._args, groups, stages.tally)

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """Lets `abandon` cancel the current task."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("rounds and evaluations run in tasks")
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    def _packed(
        self, step: int, groups: list[Group], stages: Stages, version: int
    ) -> tuple[list[Shard], dict[str, float]]:
        """The round as the trainers get it, and its metrics; in one go on a thread, as large rounds take a while."""
        for group in groups:
            self._prompts.restore(group)
        batch, early = stages.early.fill(convert(self._args, self._convert, groups))
        costs = None if self._flops is None else self._flops.of_sequences(batch.lengths)
        shards = split(batch, max(1, self._num_ranks), self._args.num_steps_per_rollout, costs)
        if self._args.save_samples:
            self._save_samples(step, groups)
        tally = stages.tally
        metrics = rollout_metrics(groups, dropped=tally.dropped, failed=tally.failed, weight_version=version)
        return shards, metrics | ({"perf/early_logprob_fraction": early} if self._args.overlap_logprobs else {})

    def _save_samples(self, step: int, groups: list[Group]) -> None:
        directory = run_dir(self._args) / SAMPLES_DIR
        directory.mkdir(parents=True, exist_ok=True)
        unfinished = directory / f".step_{step:06d}.parquet"
        try:
            write_groups(unfinished, groups)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"--save-samples cannot write round {step}: {error}. What plugins keep in labels and metadata must be "
                "JSON-able."
            ) from None
        unfinished.rename(directory / unfinished.name.removeprefix("."))
