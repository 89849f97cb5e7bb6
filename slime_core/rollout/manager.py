"""The rollout side of a run: one object that collects rounds, evaluates, and saves what it would need to go on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from slime_core.bound import blamed
from slime_core.engines.client import EngineClient
from slime_core.engines.model_dir import context_length, load_tokenizer
from slime_core.errors import CheckpointError, PluginError
from slime_core.options import Options, hook_choices
from slime_core.plugins import load_plugins
from slime_core.rollout.convert import convert, split
from slime_core.rollout.evaluate import evaluate, open_eval_datasets
from slime_core.rollout.loop_monitor import LoopMonitor
from slime_core.rollout.reward import Rewards
from slime_core.rollout.source import Source
from slime_core.rollout.stages import Stages
from slime_core.rollout.tally import Tally
from slime_core.tracking.metrics import rollout_metrics
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

STATE_FILE = "rollout.json"


@dataclass(frozen=True)
class Round:
    """What one round gives the trainers and the trackers."""

    shards: list[Shard]
    metrics: dict[str, float]
    num_tokens: int
    """Tokens that the engines generated meanwhile."""


class RolloutManager:
    """get_samples -> generate -> reward -> filters -> convert, with the plugins that the flags name.

    Built and used inside a running event loop.
    """

    def __init__(self, args: Options, router_url: str, worker_urls: Sequence[str], num_ranks: int) -> None:
        self._args = args
        self._num_ranks = num_ranks
        choices = hook_choices(args)
        self._plugins = load_plugins(args, [name for hook in ROLLOUT_HOOKS for name in choices[hook]])
        bind = self._plugins.bind
        self.engine = EngineClient(
            router_url,
            tokenizer=load_tokenizer(args.model),
            concurrency=max(1, args.engine_max_requests * len(worker_urls)),
            timeout_s=args.request_timeout_s,
            worker_urls=worker_urls,
            context_tokens=args.max_context_tokens or context_length(args.model),
        )
        self.source = Source(
            args, bind("get_samples", args.get_samples), bind("buffer_filter", args.buffer_filter), self.engine
        )
        self._eval_datasets = open_eval_datasets(args)
        self._rollout = bind("rollout", args.rollout)
        self._convert = bind("convert_train_data", args.convert_train_data)
        self._rewards = Rewards(args, self._plugins, self.engine)
        self._stages = Stages(
            args=args,
            engine=self.engine,
            generate=bind("generate", args.generate),
            rewards=self._rewards,
            dynamic_filters=[bind("dynamic_filter", name) for name in args.dynamic_filter],
            over_sampling_filters=[bind("over_sampling_filter", name) for name in args.over_sampling_filter],
            take_index=self.source.take_index,
            tally=Tally(),
        )
        self._monitor = LoopMonitor(self._plugins)
        self._monitor.__enter__()
        self.num_trained = 0
        self.num_dropped = 0

    async def rollout(self, step: int) -> Round:
        """Collect the round of `step` and split it for the trainer ranks."""
        started, tokens_before = time.monotonic(), self.engine.num_tokens_generated
        stages = self._stages = self._stages.with_tally(Tally())
        with blamed(self._rollout):
            groups = await self._rollout(
                args=self._args, step=step, source=self.source, engine=self.engine, stages=stages
            )
        self._check_groups(groups)
        collected = time.monotonic()
        batch = await convert(self._args, self._convert, groups)
        shards = split(batch, self._num_ranks, self._args.num_steps_per_rollout)
        self.num_trained += len(groups)
        self.num_dropped += stages.tally.dropped.total()
        metrics = rollout_metrics(groups, dropped=stages.tally.dropped, failed=stages.tally.failed)
        metrics |= {
            "data/drawn": float(self.source.num_drawn),
            "data/trained": float(self.num_trained),
            "data/dropped": float(self.num_dropped),
            "data/waiting": float(self.source.num_waiting),
            "data/too_long": float(self.source.num_too_long),
            "perf/collect_s": collected - started,
            "perf/convert_s": time.monotonic() - collected,
            "perf/event_loop_stall_max_s": self._monitor.take_longest_stall(),
        }
        return Round(shards, metrics, self.engine.num_tokens_generated - tokens_before)

    async def evaluate(self) -> dict[str, float]:
        """Metrics of every evaluation data set."""
        started = time.monotonic()
        metrics: dict[str, float] = {}
        for dataset in self._eval_datasets:
            metrics |= await evaluate(self._args, dataset, self._stages)
        return metrics | {"perf/eval_s": time.monotonic() - started}

    def progress(self) -> Tally:
        """The counts of the round under way."""
        return self._stages.tally

    def save(self, directory: Path) -> None:
        """Write the source, its buffer and the counters; call it between rounds.

        Raises:
            CheckpointError: when a plugin keeps what JSON cannot hold.
        """
        state = {"source": self.source.state_dict(), "num_trained": self.num_trained, "num_dropped": self.num_dropped}
        try:
            content = orjson.dumps(state, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:
            raise CheckpointError(
                f"the rollout side cannot be saved: {error}. What get_samples keeps in `state`, and labels and "
                "metadata of samples, must be JSON-able."
            ) from None
        (directory / STATE_FILE).write_bytes(content)

    def load(self, directory: Path) -> None:
        """Go on from `save`.

        Raises:
            CheckpointError: when the file cannot be read.
        """
        try:
            state: dict[str, Any] = orjson.loads((directory / STATE_FILE).read_bytes())
            self.source.load_state_dict(state["source"])
            self.num_trained, self.num_dropped = state["num_trained"], state["num_dropped"]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{directory / STATE_FILE} cannot be read: {error}") from error

    async def close(self) -> None:
        """End the reward workers and close connections and plugins."""
        self._monitor.close()
        self._rewards.close()
        self._plugins.close()
        await self.engine.close()

    def _check_groups(self, groups: list[Group]) -> None:
        fine = isinstance(groups, list) and all(isinstance(group, list) and group for group in groups)
        if not fine or not groups:
            raise PluginError(f"plugin '{self._rollout.name}': rollout must return a non-empty list of groups.")
