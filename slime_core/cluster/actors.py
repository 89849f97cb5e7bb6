"""Ray actors: each wraps one plain class and adds nothing but the transport."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from slime_core.engines.process import free_port
from slime_core.engines.router import Router
from slime_core.engines.routing import Routing
from slime_core.engines.server import EngineServer
from slime_core.options import Options
from slime_core.rollout.manager import RolloutManager
from slime_core.rollout.tally import Tally
from slime_core.training.together import follow, leading
from slime_core.training.trainer import Trainer
from slime_core.weights.sync import WeightSync

MAX_MESSAGES = 100
"""Warnings kept for the driver between two polls."""


GC_THRESHOLDS = (50_000, 20, 100)
"""Python's own are made for programs that hold far fewer objects than a round of answers."""


def tune_garbage_collector() -> None:
    """What start-up made stays: the collector need not look at it again with every few hundred answers."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


@dataclass(frozen=True)
class RoundRefs:
    """A round whose shards stay in Ray's object store."""

    shards: list[Any]
    metrics: dict[str, float]


@ray.remote(max_restarts=0)
class EngineActor:
    """Owns one engine's server process."""

    def start(self, args: Options, index: int, run_dir: Path, threads: int, again: bool) -> str:
        """The URL of a healthy server."""
        self._server = EngineServer(args, index, run_dir / "logs", threads)
        return self._server.start(again)

    def check(self, paused: bool, at_once: bool = False) -> None:
        """Do nothing while the server is healthy, or paused; an EngineError otherwise."""
        self._server.check(paused, at_once)

    def stop(self) -> None:
        """End the server."""
        self._server.stop()


@ray.remote(num_cpus=0, max_restarts=0)
class RolloutActor:
    """Owns the router process and the RolloutManager."""

    async def start(self, args: Options, worker_urls: Sequence[str], num_ranks: int, run_dir: Path) -> None:
        """Bring up the router and load the plugins."""
        self._messages = MessageCollector(run_dir / "logs" / "rollout.log")
        self._routing: Routing | None = None
        if worker_urls:
            router = await asyncio.to_thread(Router, args, worker_urls, run_dir / "logs")
            self._routing = Routing(args, router, worker_urls)
        url = self._routing.url if self._routing else ""
        self._manager = RolloutManager(args, url, worker_urls, num_ranks)
        tune_garbage_collector()

    async def rollout(self, step: int, version: int) -> RoundRefs:
        """Collect a round under weights `version`."""
        collected = await self._manager.rollout(step, version)
        shards = await asyncio.to_thread(lambda: [ray.put(shard) for shard in collected.shards])
        return RoundRefs(shards, collected.metrics)

    async def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate on every data set."""
        return await self._manager.evaluate(step)

    async def engines_free(self) -> None:
        """Return when the requests that the last round did not need are gone."""
        await self._manager.engines_free()

    async def progress(self) -> tuple[Tally, list[str]]:
        """The counts of the round under way, and warnings since the last call; an EngineError without a router."""
        if self._routing is not None:
            self._routing.check()
        return self._manager.progress(), self._messages.take()

    async def admit(self, url: str) -> None:
        """Let an engine take requests."""
        if self._routing is not None:
            self._manager.engine.add_worker(url)
            await self._routing.admit(url)

    async def dismiss(self, url: str) -> None:
        """Send an engine nothing more."""
        if self._routing is not None:
            self._manager.engine.remove_worker(url)
            await self._routing.dismiss(url)

    async def abandon(self) -> None:
        """Give up the round and the evaluation under way; their groups wait for a later round."""
        await self._manager.abandon()

    async def save(self, directory: Path, num_rounds: int) -> None:
        """Write the rollout side's state after `num_rounds` trained rounds."""
        await self._manager.save(directory, num_rounds)

    async def load(self, directory: Path) -> None:
        """Go on from a saved state."""
        self._manager.load(directory)

    async def stop(self) -> None:
        """End the reward workers and the router."""
        await self._manager.close()
        if self._routing is not None:
            await self._routing.close()


@ray.remote(max_restarts=0)
class TrainerActor:
    """One rank of the trainer."""

    def reserve_address(self, local: bool) -> tuple[str, int]:
        """Where rank 0 will listen for the others."""
        return ("127.0.0.1" if local else ray.util.get_node_ip_address()), free_port()

    def start(
        self, args: Options, rank: int, world_size: int, address: tuple[str, int], device: str, threads: int
    ) -> None:
        """Load the model."""
        import torch

        from slime_core.training.torch_backend.trainer import TorchTrainer

        torch.set_num_threads(threads)
        host, port = address
        self._sync: WeightSync | None = None
        self._trainer: Trainer = TorchTrainer(
            args, rank=rank, world_size=world_size, master_address=host, master_port=port, device=device
        )

    def connect(self, args: Options, run_dir: Path) -> None:
        """Prepare to send weights; rank 0 only."""
        self._sync = WeightSync(args, [], run_dir)

    def train(self, step: int, shard_refs: list[Any]) -> dict[str, float]:
        """Train on the one shard of the list (a list, so that Ray hands over the reference and not the data)."""
        return self._trainer.train(step, ray.get(shard_refs[0]))

    def send_weights(self, version: int, worker_urls: Sequence[str]) -> dict[str, float]:
        """Give all engines, which are these, the current weights; rank 0 speaks with them."""
        if self._sync is not None:
            self._sync.set_engines(worker_urls)
        return self._send(version, None)

    def send_weights_to(self, version: int, url: str) -> None:
        """Give an engine that joins the weights that the others have; rank 0 speaks with it."""
        self._send(version, [url])

    def _send(self, version: int, worker_urls: Sequence[str] | None) -> dict[str, float]:
        if self._sync is None:
            follow(self._trainer)
            return {}
        with leading(self._trainer) as source:
            return asyncio.run(self._sync.send(source, version, worker_urls))

    def save(self, directory: Path, num_rounds: int) -> None:
        """Write the training state, or begin to."""
        self._trainer.save(directory)

    def saved(self, wait: bool) -> bool:
        """Whether it is written."""
        return self._trainer.saved(wait=wait)

    def export(self, directory: Path) -> None:
        """Write the model as transformers reads it."""
        self._trainer.export(directory)

    def load(self, directory: Path) -> None:
        """Go on from a saved state."""
        self._trainer.load(directory)

    def stop(self) -> None:
        """Leave the process group."""
        if self._sync is not None:
            self._sync.close()
        self._trainer.close()


class MessageCollector(logging.Handler):
    """Writes the process's log to a file and keeps warnings for the driver to show."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        path.parent.mkdir(parents=True, exist_ok=True)
        logging.basicConfig(
            filename=path, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
        )
        logging.getLogger("slime_core").addHandler(self)
        self._messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one warning."""
        if len(self._messages) < MAX_MESSAGES:
            self._messages.append(record.getMessage())

    def take(self) -> list[str]:
        """What came since the last call."""
        messages, self._messages = self._messages, []
        return messages
