"""TorchTrainer: one data-parallel rank that trains a transformers model with plain torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime_core.plugins import load_plugins
from slime_core.training.batch import TensorBatch, micro_batches
from slime_core.training.ranks import Ranks
from slime_core.training.round import MicroLoss, Round
from slime_core.training.torch_backend import checkpoint
from slime_core.training.torch_backend.critic import Critic
from slime_core.training.torch_backend.export import named_weights, published_weights, write_model
from slime_core.training.torch_backend.frozen import Frozen
from slime_core.training.torch_backend.load import load_policy
from slime_core.training.torch_backend.model import Policy
from slime_core.training.torch_backend.optimizer import Optimizer
from slime_core.training.torch_backend.routing import RoutingReplay
from slime_core.training.torch_backend.sharding import in_step
from slime_core.training.torch_backend.state import restore, tensors_of
from slime_core.types import FloatArray, IntArray, Shard

CPU_MICRO_BATCH = 4096
"""Tokens of a micro-batch on CPU, where smaller arrays stay in the caches; `--max-tokens-per-gpu` may be less."""


class TorchTrainer:
    """A rank of the torch backend; see `slime_core.training.trainer.Trainer` for what its methods promise."""

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        rank: int,
        world_size: int,
        master_address: str,
        master_port: int,
        device: str,
    ) -> None:
        if args.trainer_threads is not None:
            torch.set_num_threads(args.trainer_threads)
        torch.manual_seed(args.seed)
        self._args = args
        self._plugins = load_plugins(args, [args.advantage_estimator, args.policy_loss])
        self._device = torch.device(device)
        self._sharded = args.data_parallel == "fsdp2"
        self.ranks = Ranks.join(
            rank, world_size, address=master_address, port=master_port, device=self._device, group=self._sharded
        )
        self._policy = load_policy(args, self.ranks)
        self._routing = RoutingReplay(self._policy) if args.routing_replay else None
        self._frozen = Frozen(args, self.ranks)
        self._optimizer = Optimizer(args, self._policy.model)
        on_cpu = self._device.type == "cpu"
        self._max_tokens = min(args.max_tokens_per_gpu, CPU_MICRO_BATCH) if on_cpu else args.max_tokens_per_gpu
        self.critic = Critic(args, self.ranks, self._max_tokens) if args.critic else None
        self._optimizers = {"policy": self._optimizer} | ({"critic": self.critic.optimizer} if self.critic else {})
        self._round = Round(args, self, self._plugins)
        self._writer = checkpoint.StateWriter(self.ranks, beside=args.async_save)

    # --- a round ------------------------------------------------------------------------------------------------------
    def train(self, step: int, shard: Shard) -> dict[str, float]:
        """Train one round; the metrics are the same on every rank."""
        if self._args.reset_optimizer_state:
            for optimizer in self._optimizers.values():
                optimizer.reset()
        if self._routing is not None:
            self._routing.forget()
        return self._round.train(step, shard)

    def early_logprobs(self, shard: Shard) -> dict[str, Any]:
        """Log-probabilities of samples whose round is still being generated."""
        return self._round.early_logprobs(shard)

    @property
    def lr(self) -> float:
        """Of the next step."""
        return self._optimizer.lr

    def logprobs(self, batch: TensorBatch, rows: IntArray) -> torch.Tensor:
        """Log-probabilities [R] of the policy at these samples, 0 at the others."""
        return self._recompute(self._policy, batch, rows)

    def reference_logprobs(self, batch: TensorBatch, rows: IntArray) -> torch.Tensor | None:
        """Those of the reference, where there is one."""
        reference = self._frozen.reference
        return None if reference is None else self._recompute(reference, batch, rows)

    def teacher_logprobs(self, batch: TensorBatch, rows: IntArray) -> torch.Tensor | None:
        """Those of the teacher, where there is one."""
        teacher = self._frozen.teacher
        return None if teacher is None else self._recompute(teacher, batch, rows)

    def renew_reference(self) -> None:
        """Make the policy's present weights the reference's."""
        self._frozen.renew_reference(self._policy.model)

    def _recompute(self, policy: Policy, batch: TensorBatch, rows: IntArray) -> torch.Tensor:
        """Log-probabilities [R] of a model at these samples, 0 at the others."""
        parts = torch.zeros_like(batch.rollout_logprobs)
        responses = torch.from_numpy(batch.host.response_lengths.astype(np.int64))
        by_sample = list(parts.split(responses.tolist()))
        with torch.no_grad():
            for some in self._micro_batches(policy, batch, rows):
                if some is None:
                    policy.idle()
                    continue
                part = batch.select(some)
                with self._recorded(policy, some, part):
                    logprobs, _ = policy.logprobs(part)
                for row, values in zip(some, logprobs.split(responses[some].tolist()), strict=True):
                    by_sample[row].copy_(values)
        return parts

    def backward(self, batch: TensorBatch, rows: IntArray, loss: MicroLoss) -> None:
        """Forward and backward of this rank's share of a step, micro-batch by micro-batch."""
        self._optimizer.gradients.zero()
        for some in self._micro_batches(self._policy, batch, rows):
            if some is None:
                self._policy.idle().backward()
                continue
            part = batch.select(some)
            with self._replayed(some, part):
                logprobs, entropy = self._policy.logprobs(part)
                loss(some, part, logprobs, entropy).backward()

    def _recorded(self, policy: Policy, rows: IntArray, part: TensorBatch) -> AbstractContextManager[None]:
        """Under --routing-replay the policy's experts are remembered, and no frozen model's."""
        if self._routing is None or policy is not self._policy:
            return nullcontext()
        return self._routing.recorded(rows, part.host.lengths)

    def _replayed(self, rows: IntArray, part: TensorBatch) -> AbstractContextManager[None]:
        return nullcontext() if self._routing is None else self._routing.replayed(rows, part.host.lengths)

    def _micro_batches(self, policy: Policy, batch: TensorBatch, rows: IntArray) -> Iterator[IntArray | None]:
        parts = micro_batches(batch.host.lengths, rows, self._max_tokens, padded=not policy.packs)
        return in_step(parts, self.ranks, sharded=self._sharded)

    def update(self) -> float:
        """Sum the gradients over the ranks and update, or skip; the gradient norm."""
        return self._optimizer.update(self.ranks)

    def skip(self) -> None:
        """Go on in the schedule without an update."""
        self._optimizer.skip()

    # --- weights and checkpoints --------------------------------------------------------------------------------------
    def weights(self, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights for the engines, under Hugging Face names: those of files for SGLang, else the model's own."""
        # the embedded engine is a transformers model too
        named = published_weights if self._args.engine == "sglang" else named_weights
        return named(self._policy.model, getattr(torch, dtype))

    def prompt_logprobs(self, tokens: Sequence[int]) -> FloatArray:
        """Log-probabilities [n - 1] of a prompt's tokens under the present weights."""
        logprobs: FloatArray = self._policy.prompt_logprobs(tokens).cpu().numpy()
        return logprobs

    def broadcast(self, message: dict[str, Any] | None) -> dict[str, Any]:
        """Rank 0's message, on every rank."""
        return self.ranks.broadcast(message)

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        return int(self._policy.model.config.get_text_config().vocab_size)

    @property
    def dtype(self) -> str:
        """Of the weights, for example `float32`."""
        return str(self._policy.dtype).removeprefix("torch.")

    def save(self, directory: Path) -> None:
        """Write the training state, or begin to; every rank writes its share."""
        self._writer.save(tensors_of(self._optimizers, self._frozen.renewed(), self.ranks.rank), directory)

    def saved(self, *, wait: bool) -> bool:
        """Whether it is all written."""
        if wait:
            self._writer.finish()
        return self._writer.finished()

    def export(self, directory: Path) -> None:
        """Write the policy as transformers reads it; rank 0 does."""
        writes = self.ranks.rank == 0
        write_model(self._policy.model, self._policy.dtype, Path(self._args.model), directory, writes=writes)

    def load(self, directory: Path) -> None:
        """Go on from a checkpoint; a rank it did not have keeps its fresh random state."""
        restore(self._optimizers, self._frozen.renewed(), self.ranks, directory)

    def close(self) -> None:
        """Finish what is being written, leave the process group and close the plugins."""
        self._writer.finish()
        self._plugins.close()
        self.ranks.leave()
