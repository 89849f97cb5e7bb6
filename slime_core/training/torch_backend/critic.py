"""The critic of PPO: a model of its own that says what return to expect before each response token."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import nn

from slime_core.algorithms import segment_sum, value_loss
from slime_core.errors import CheckpointError
from slime_core.training.batch import TensorBatch, micro_batches
from slime_core.training.meters import Meters
from slime_core.training.ranks import Ranks
from slime_core.training.torch_backend import checkpoint
from slime_core.training.torch_backend.model import load_policy
from slime_core.training.torch_backend.optimizer import Optimizer
from slime_core.types import IntArray

NAME = "critic"
"""Of its state in a checkpoint."""


class Critic(nn.Module):
    """The body of a causal LM and a linear head, which starts at 0; trained beside the policy, step by step."""

    def __init__(self, args: argparse.Namespace, device: torch.device, ranks: Ranks, max_tokens: int) -> None:
        super().__init__()
        self._args, self._ranks, self._max_tokens = args, ranks, max_tokens
        # a dataclass, not a module: only the body is this critic's
        self._model = load_policy(args, device, args.critic_model)
        self.body = self._model.model.base_model
        size = self._model.model.config.get_text_config().hidden_size
        self.head = nn.Linear(size, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self._optimizer = Optimizer(argparse.Namespace(**{**vars(args), "lr": args.critic_lr}), self)

    def forward(self, batch: TensorBatch) -> torch.Tensor:
        """The value before each response token: float32 [R]."""
        values: torch.Tensor = self.head(self._model.states(batch).float())[:, 0]
        return values

    def values(self, batch: TensorBatch, rows: IntArray) -> torch.Tensor:
        """Values [R] of these samples, without gradient, 0 at the others."""
        found = torch.zeros_like(batch.rollout_logprobs)
        lengths = batch.host.response_lengths.astype("int64")
        by_sample = list(torch.split(found, lengths.tolist()))
        with torch.no_grad():
            for some in micro_batches(batch.host.lengths, rows, self._max_tokens):
                values = torch.split(self(batch.select(some)), lengths[some].tolist())
                for row, part in zip(some, values, strict=True):
                    by_sample[row].copy_(part)
        return found

    def train_step(self, batch: TensorBatch, rows: IntArray, meters: Meters) -> None:
        """One optimiser step towards the returns, over the trained tokens of samples with a reward, all ranks."""
        taught = batch.loss_mask & batch.expand(~batch.rewards.isnan())
        counts = segment_sum(taught.double(), batch.response_lengths)
        total = self._ranks.sum_(counts[torch.from_numpy(rows).to(counts.device)].sum()[None]).item()
        self._optimizer.zero_grad()
        for some in micro_batches(batch.host.lengths, rows, self._max_tokens):
            part = batch.select(some)
            if part.values is None or part.returns is None:
                raise AssertionError("the trainer sets values and returns before the critic trains")
            losses, clipped = value_loss(self(part), part.values, part.returns, self._args.value_clip)
            mask = part.loss_mask & part.expand(~part.rewards.isnan())
            loss = torch.where(mask, losses, 0.0).sum() / max(1.0, total)
            loss.backward()
            meters.add_losses({"value_loss": loss})
            meters.add({"value": part.values, "value_clip_fraction": clipped.float()}, mask)
        for flat in self._optimizer.gradients:
            self._ranks.sum_(flat)
        norm = self._optimizer.grad_norm()
        if total and math.isfinite(norm):
            self._optimizer.step(norm)
        else:
            self._optimizer.skip()

    def save(self, directory: Path) -> None:
        """Write weights and optimiser."""
        state = {"model": self.state_dict(), "optimizer": self._optimizer.state_dict()}
        checkpoint.save_state(state, directory, NAME)

    def load(self, directory: Path, device: torch.device) -> None:
        """Go on from what `save` wrote.

        Raises:
            CheckpointError: when it is missing or of another critic.
        """
        state = checkpoint.load_state(directory, NAME, device)
        try:
            self.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
        except (KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"the critic in {directory} does not fit: {error}; resume with the same --critic-model."
            ) from None
