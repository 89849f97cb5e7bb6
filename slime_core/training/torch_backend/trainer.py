"""TorchTrainer: one data-parallel rank that trains a transformers model with plain torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime_core.errors import CheckpointError
from slime_core.plugins import load_plugins
from slime_core.training.batch import TensorBatch, micro_batches
from slime_core.training.ranks import Ranks
from slime_core.training.round import MicroLoss, Round
from slime_core.training.torch_backend import checkpoint
from slime_core.training.torch_backend.critic import Critic
from slime_core.training.torch_backend.frozen import Frozen
from slime_core.training.torch_backend.model import Policy, load_policy, named_weights
from slime_core.training.torch_backend.optimizer import Optimizer
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
        self._device = torch.device(device)
        self._plugins = load_plugins(args, [args.advantage_estimator, args.policy_loss])
        self._policy = load_policy(args, self._device)
        self._frozen = Frozen(args, self._device)
        self._optimizer = Optimizer(args, self._policy.model)
        self.ranks = Ranks.join(rank, world_size, address=master_address, port=master_port, device=self._device)
        on_cpu = self._device.type == "cpu"
        self._max_tokens = min(args.max_tokens_per_gpu, CPU_MICRO_BATCH) if on_cpu else args.max_tokens_per_gpu
        self.critic = Critic(args, self._device, self.ranks, self._max_tokens) if args.critic else None
        self._round = Round(args, self, self._plugins)

    # --- a round ------------------------------------------------------------------------------------------------------
    def train(self, step: int, shard: Shard) -> dict[str, float]:
        """Train one round; the metrics are the same on every rank."""
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
            for some in micro_batches(batch.host.lengths, rows, self._max_tokens):
                logprobs, _ = policy.logprobs(batch.select(some))
                for row, values in zip(some, logprobs.split(responses[some].tolist()), strict=True):
                    by_sample[row].copy_(values)
        return parts

    def backward(self, batch: TensorBatch, rows: IntArray, loss: MicroLoss) -> None:
        """Forward and backward of this rank's share of a step, micro-batch by micro-batch."""
        self._optimizer.zero_grad()
        for some in micro_batches(batch.host.lengths, rows, self._max_tokens):
            part = batch.select(some)
            logprobs, entropy = self._policy.logprobs(part)
            loss(some, part, logprobs, entropy).backward()

    def update(self) -> float:
        """Sum the gradients over the ranks and update, or skip; the gradient norm."""
        for flat in self._optimizer.gradients:
            self.ranks.sum_(flat)
        norm = self._optimizer.grad_norm()
        if math.isfinite(norm):
            self._optimizer.step(norm)
        else:
            self._optimizer.skip()
        return norm

    def skip(self) -> None:
        """Go on in the schedule without an update."""
        self._optimizer.skip()

    # --- weights and checkpoints --------------------------------------------------------------------------------------
    def weights(self, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights for the engines, under Hugging Face names."""
        return named_weights(self._policy.model, getattr(torch, dtype))

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
        return str(self._policy.model.dtype).removeprefix("torch.")

    def save(self, directory: Path) -> None:
        """Write model and training state; the ranks' weights and optimisers are equal, so rank 0 writes them."""
        try:
            if self.ranks.rank == 0:
                checkpoint.save_model(self._policy.model, Path(self._args.model), directory)
                checkpoint.save_state({"optimizer": self._optimizer.state_dict()}, directory, "state")
                self._frozen.save(directory)
                if self.critic is not None:
                    self.critic.save(directory)
            checkpoint.save_state({"rng": torch.get_rng_state()}, directory, f"rank_{self.ranks.rank}")
        except OSError as error:
            raise CheckpointError(f"the checkpoint {directory} cannot be written: {error}") from error

    def load(self, directory: Path) -> None:
        """Go on from a checkpoint; a rank it did not have keeps its fresh random state."""
        checkpoint.load_model(self._policy.model, directory)
        self._frozen.load(directory)
        if self.critic is not None:
            self.critic.load(directory, self._device)
        state = checkpoint.load_state(directory, "state", self._device)
        try:
            self._optimizer.load_state_dict(state["optimizer"])
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"the training state in {directory} does not fit: {error}; resume with the options of the run."
            ) from None
        own = f"rank_{self.ranks.rank}"
        if (directory / checkpoint.TRAINER / f"{own}.pt").is_file():
            torch.set_rng_state(checkpoint.load_state(directory, own, torch.device("cpu"))["rng"])

    def close(self) -> None:
        """Leave the process group and close the plugins."""
        self._plugins.close()
        self.ranks.leave()
