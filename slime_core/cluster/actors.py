"""Ray actors of engines and rollout: each wraps one plain class and adds nothing but the transport."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from slime_core.engines.client import EngineClient
from slime_core.engines.connect import connect
from slime_core.engines.frozen import options_of
from slime_core.engines.parallel import Node
from slime_core.engines.process import LOOPBACK, free_port
from slime_core.engines.router import Router
from slime_core.engines.routing import Routing
from slime_core.engines.server import EngineServer
from slime_core.errors import EngineError
from slime_core.options import Options
from slime_core.rollout.manager import RolloutManager
from slime_core.rollout.tally import Tally

POLICY = "engine"
"""Whose engines: the policy's. Frozen models have names of their own, never this one."""

PART_TIMEOUT_S = 30.0
"""What another machine may take to answer how its part of an engine is."""

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
    """Owns one engine's server process, or one machine's part of it."""

    def __init__(self) -> None:
        self._followers: Sequence[Any] = ()

    def start(
        self,
        args: Options,
        name: str,
        index: int,
        run_dir: Path,
        threads: int,
        gpus: Sequence[str],
        followers: Sequence[Any],
        again: bool,
    ) -> str:
        """The URL of a healthy server.

        Args:
            gpus: those it is lent by trainers.
            followers: actors on further machines, which start their parts of it.
        """
        host = LOOPBACK if args.ray_address is None else ray.util.get_node_ip_address()
        self._followers = followers
        node = Node(host, 0, 1 + len(followers), f"{host}:{free_port(host)}")
        ray.get(
            [f.start_part.remote(args, name, index, run_dir, threads, node, i + 1) for i, f in enumerate(followers)]
        )
        self._server = EngineServer(args, index, run_dir / "logs", threads, name, gpus, node)
        return self._server.start(again, self._check_followers)

    def start_part(
        self, args: Options, name: str, index: int, run_dir: Path, threads: int, first: Node, rank: int
    ) -> None:
        """Start the part of machine `rank` of an engine whose first machine's is `first`."""
        host = LOOPBACK if args.ray_address is None else ray.util.get_node_ip_address()
        node = replace(first, host=host, rank=rank)
        self._server = EngineServer(args, index, run_dir / "logs", threads, name, node=node)
        self._server.start_part()

    def check(self, paused: bool, at_once: bool = False) -> None:
        """Do nothing while the server is healthy, or paused; an EngineError otherwise."""
        self._check_followers()
        self._server.check(paused, at_once)

    def check_part(self) -> None:
        """Do nothing while the process runs."""
        self._server.check_process()

    def stop(self) -> None:
        """End the server, all parts of it."""
        stopping = [follower.stop.remote() for follower in self._followers]
        self._server.stop()
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=PART_TIMEOUT_S)

    def _check_followers(self) -> None:
        for answer in [follower.check_part.remote() for follower in self._followers]:
            try:
                ray.get(answer, timeout=PART_TIMEOUT_S)
            except RayTaskError as error:
                raise EngineError(str(error.cause)) from None
            except RayError as error:
                raise EngineError(f"a part of the engine on another machine is gone: {error}") from None


@ray.remote(num_cpus=0, max_restarts=0)
class RolloutActor:
    """Owns the router process and the RolloutManager."""

    async def start(
        self,
        args: Options,
        worker_urls: Sequence[str],
        frozen_urls: Mapping[str, Sequence[str]],
        num_ranks: int,
        run_dir: Path,
    ) -> None:
        """Bring up the routers, one a model, and load the plugins."""
        self._messages = MessageCollector(run_dir / "logs" / "rollout.log")
        self._routings: dict[str, Routing] = {}
        url = await self._route(args, POLICY, worker_urls, run_dir) if worker_urls else ""
        frozen = {}
        for model in args.frozen_model:
            own, urls = options_of(args, model), frozen_urls[model.name]
            frozen[model.name] = connect(own, await self._route(own, model.name, urls, run_dir), urls)
        self._manager = RolloutManager(args, url, worker_urls, num_ranks, frozen)
        tune_garbage_collector()

    async def _route(self, args: Options, model: str, worker_urls: Sequence[str], run_dir: Path) -> str:
        """The address of a new router."""
        name = "router" if model == POLICY else f"router_{model}"
        router = await asyncio.to_thread(Router, args, worker_urls, run_dir / "logs", name)
        self._routings[model] = Routing(args, router, worker_urls)
        return router.url

    async def rollout(self, step: int, version: int) -> RoundRefs:
        """Collect a round under weights `version`."""
        collected = await self._manager.rollout(step, version)
        shards = await asyncio.to_thread(lambda: [ray.put(shard) for shard in collected.shards])
        return RoundRefs(shards, collected.metrics)

    async def take_early(self) -> list[Any] | None:
        """References to a shard a rank of what will be trained and is new; None without any."""
        shards = await self._manager.take_early()
        return None if shards is None else await asyncio.to_thread(lambda: [ray.put(shard) for shard in shards])

    async def note_early(self, answers: Sequence[Any]) -> None:
        """What the ranks found about it, by reference."""
        self._manager.note_early(await asyncio.to_thread(ray.get, list(answers)))

    async def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate on every data set."""
        return await self._manager.evaluate(step)

    async def engines_free(self) -> None:
        """Return when the requests that the last round did not need are gone."""
        await self._manager.engines_free()

    async def progress(self) -> tuple[Tally, list[str]]:
        """The counts of the round under way, and warnings since the last call; an EngineError without a router."""
        for routing in self._routings.values():
            routing.check()
        return self._manager.progress(), self._messages.take()

    async def admit(self, model: str, url: str) -> None:
        """Let an engine of a model take requests."""
        self._client(model).add_worker(url)
        await self._routings[model].admit(url)

    async def dismiss(self, model: str, url: str) -> None:
        """Send an engine of a model nothing more."""
        self._client(model).remove_worker(url)
        await self._routings[model].dismiss(url)

    def _client(self, model: str) -> EngineClient:
        return self._manager.engine if model == POLICY else self._manager.engine.frozen[model]

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
        """End the reward workers and the routers."""
        await self._manager.close()
        for routing in self._routings.values():
            await routing.close()


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
