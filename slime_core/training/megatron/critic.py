"""The critic of PPO in Megatron's parts: a model of its own, cut as the policy is."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from slime_core.training.batch import TensorBatch
from slime_core.training.megatron.convert import load_weights
from slime_core.training.megatron.model import build_model
from slime_core.training.megatron.optimizer import Optimizer, wrap
from slime_core.training.megatron.passes import differentiate, evaluate, shares
from slime_core.training.megatron.ranks import MegatronRanks
from slime_core.training.meters import Meters
from slime_core.training.value_objective import ValueLoss, critic_options
from slime_core.types import IntArray


class Critic:
    """A causal LM's body and a linear head on the last stage; see `slime_core.training.round.Critic`."""

    def __init__(self, args: argparse.Namespace, ranks: MegatronRanks) -> None:
        self._args, self._ranks = args, ranks
        directory = args.critic_model or args.model
        self.model = build_model(args, directory, ranks.device, critic=True)
        load_weights(self.model, Path(directory))
        wrap(args, self.model)
        self.optimizer = Optimizer(critic_options(args), self.model)

    def values(self, batch: TensorBatch, rows: IntArray) -> torch.Tensor:
        """Values [R] of these samples, without gradient, 0 at the others and at tokens that nothing precedes."""
        return evaluate(self.model, batch, self._shares(batch, rows))

    def train_step(self, batch: TensorBatch, rows: IntArray, meters: Meters) -> float | None:
        """One optimiser step towards the returns; its gradient's norm, None where no token has one."""
        loss = ValueLoss.of_step(self._args, batch, rows, self._ranks, meters)

        def of_part(rows: IntArray, part: TensorBatch, values: torch.Tensor) -> torch.Tensor:
            return loss(part, values)

        self.optimizer.zero_grad()
        differentiate(self.model, batch, self._shares(batch, rows), of_part)
        if loss.num_tokens:
            return self.optimizer.step()
        self.optimizer.skip()
        return None

    def _shares(self, batch: TensorBatch, rows: IntArray) -> list[IntArray]:
        return shares(batch, rows, self._ranks.data_parallel, self._args.max_tokens_per_gpu)
