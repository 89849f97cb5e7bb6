"""The Ray actor of a trainer's rank. In a file of its own, so that an engine's actor loads no torch."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
import torch

from slime_core.engines.process import free_port
from slime_core.options import Options
from slime_core.rollout.early import Found
from slime_core.training.together import follow, leading
from slime_core.training.trainer import Trainer
from slime_core.weights.sync import WeightSync


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
