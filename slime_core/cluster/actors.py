"""Ray actors: each wraps one plain class and adds nothing but the transport."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
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
from slime_core.rollout.early import Found
from slime_core.rollout.manager import RolloutManager
from slime_core.rollout.tally import Tally
from slime_core.training.together import follow, leading
from slime_core.training.trainer import Trainer
from slime_core.weights.sync import WeightSync

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


@ray.remote(max_restarts=0)
class TrainerActor:
    """One rank of the trainer."""

    def reserve_address(self, local: bool) -> tuple[str, int]:
        """Where rank 0 will listen for the others."""
        return ("127.0.0.1" if local else ray.util.get_node_ip_address()), free_port()

    def gpus(self) -> tuple[str, list[str]]:
        """The machine, and which of its GPUs this rank has."""
        return ray.get_runtime_context().get_node_id(), [str(gpu) for gpu in ray.get_gpu_ids()]

    def start(
        self, args: Options, rank: int, world_size: int, address: tuple[str, int], device: str, threads: int
    ) -> None:
        """Load the model."""
        import torch

        torch.set_num_threads(threads)
        if device == "cuda" and args.weight_transport == "broadcast":
            # as SGLang sets it for its processes: ranks that differ in it cannot read one another's memory
            os.environ.setdefault("NCCL_CUMEM_ENABLE", str(int("enable-symm-mem" in args.sglang)))
        host, port = address
        self._sync: WeightSync | None = None
        self._trainer: Trainer = trainer_class(args.train_backend, device)(
            args, rank=rank, world_size=world_size, master_address=host, master_port=port, device=device
        )

    def connect(self, args: Options, run_dir: Path) -> tuple[int, float]:
        """Prepare to send weights; rank 0 only. The id of its process, and when that was started."""
        self._sync = WeightSync(args, [], run_dir)
        return os.getpid(), psutil.Process().create_time()

    def train(self, step: int, shard_refs: list[Any]) -> dict[str, float]:
        """Train on the one shard of the list (a list, so that Ray hands over the reference and not the data)."""
        return self._trainer.train(step, ray.get(shard_refs[0]))

    def early_logprobs(self, shard_refs: list[Any]) -> Found:
        """Log-probabilities of samples of the round that is still being generated."""
        return self._trainer.early_logprobs(ray.get(shard_refs[0]))

    def release_engines(self, worker_urls: Sequence[str]) -> dict[str, float]:
        """Let all engines, which are these, free their GPU memory; rank 0 does it."""
        if self._sync is not None:
            self._sync.set_engines(worker_urls)
            asyncio.run(self._sync.release())
        return {}

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


def trainer_class(backend: str, device: str) -> Any:
    """The Trainer of `--train-backend`."""
    if backend == "megatron":
        from slime_core.training.megatron.device import prepare_megatron

        prepare_megatron(device)
        from slime_core.training.megatron.trainer import MegatronTrainer

        return MegatronTrainer
    from slime_core.training.torch_backend.trainer import TorchTrainer

    return TorchTrainer


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
