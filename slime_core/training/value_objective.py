"""The loss of the critic, micro-batch by micro-batch, and its optimiser's options, the same for every backend."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from slime_core.algorithms import segment_sum, value_loss
from slime_core.training.batch import TensorBatch
from slime_core.training.meters import Meters
from slime_core.training.ranks import DataParallel
from slime_core.types import IntArray


@dataclass(frozen=True)
class ValueLoss:
    """The loss of one optimiser step: the mean over the trained tokens, all ranks, of samples with a reward."""

    clip: float
    num_tokens: float
    """The tokens that the mean is over."""
    meters: Meters

    @classmethod
    def of_step(
        cls, args: argparse.Namespace, batch: TensorBatch, rows: IntArray, ranks: DataParallel, meters: Meters
    ) -> ValueLoss:
        """The loss of the step that trains these samples; every rank must call it.

        Args:
            args: the options.
            batch: the round's.
            rows: this rank's samples in the step.
            ranks: those that share the step's samples.
            meters: of the round.
        """
        counts = segment_sum(_taught(batch).double(), batch.response_lengths)
        total = ranks.sum_(counts[torch.from_numpy(rows).to(counts.device)].sum()[None]).item()
        return cls(args.value_clip, total, meters)

    def __call__(self, batch: TensorBatch, values: torch.Tensor) -> torch.Tensor:
        """The scalar whose gradient the micro-batch adds to the step's.

        Args:
            batch: the micro-batch, with the values before the round and the returns.
            values: float32 [R], with gradient.
        """
        if batch.values is None or batch.returns is None:
            raise AssertionError("the round sets values and returns before the critic trains")
        losses, clipped = value_loss(values, batch.values, batch.returns, self.clip)
        taught = _taught(batch)
        loss = torch.where(taught, losses, 0.0).sum() / max(1.0, self.num_tokens)
        self.meters.add_losses({"value_loss": loss})
        self.meters.add_part({"value": batch.values, "value_clip_fraction": clipped.float()}, taught)
        return loss


def critic_options(args: argparse.Namespace) -> argparse.Namespace:
    """The options of the critic's optimiser: AdamW with `--critic-lr`, over all rounds."""
    own = {"lr": args.critic_lr, "optimizer": "adamw", "critic_only_rounds": 0}
    return argparse.Namespace(**{**vars(args), **own})


def _taught(batch: TensorBatch) -> torch.Tensor:
    """[R] bool, the tokens whose return is known."""
    return batch.loss_mask & batch.expand(~batch.rewards.isnan())
