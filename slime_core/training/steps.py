"""The optimiser steps of a round, with their sizes over all ranks, which make the loss exact however it is split."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from slime_core.errors import SlimeError
from slime_core.training.ranks import DataParallel
from slime_core.types import IntArray, Shard, TrainBatch


@dataclass(frozen=True)
class Step:
    """One optimiser step: this rank's samples that train, and the size of the whole."""

    rows: IntArray
    num_tokens: int
    """Trained tokens, all ranks."""
    num_sequences: int
    """Samples with a trained token, all ranks."""
    num_samples: int
    """All of them, all ranks."""
    num_rollouts: int = 0
    """Rollouts with a trained token, all ranks; counted under `--loss-aggregation rollout`."""
    rollout_tokens: torch.Tensor | None = None
    """[S] trained tokens, all ranks, of the rollout that each sample of this rank's batch belongs to; likewise."""

    def denominator(self, args: argparse.Namespace) -> float:
        """What the sum of the step's losses is divided by."""
        if args.loss_aggregation == "constant":
            constant = args.max_response_tokens if args.loss_constant is None else args.loss_constant
            return float(self.num_samples * constant)
        return {"token": self.num_tokens, "sequence": self.num_sequences, "rollout": self.num_rollouts}[
            args.loss_aggregation
        ]


def round_steps(args: argparse.Namespace, shard: Shard, ranks: DataParallel) -> list[Step]:
    """The steps of a round; every rank must call it.

    Raises:
        SlimeError: when `--use-rollout-logprobs` trains tokens whose log-probabilities the engine did not give.
    """
    batch = shard.batch
    trained = trained_tokens(batch)
    starts = [0, *shard.step_ends[:-1]]
    spans = [np.arange(start, end) for start, end in zip(starts, shard.step_ends, strict=True)]
    rows = [span[trained[span] > 0] for span in spans]
    unknown = int((np.isnan(batch.rollout_logprobs) & (batch.loss_mask > 0)).sum())
    sizes = [[int(trained[part].sum()), len(part), len(span)] for part, span in zip(rows, spans, strict=True)]
    counts = torch.tensor([*sizes, [unknown, 0, 0]], dtype=torch.int64, device=ranks.device)
    *totals, (missing, *_) = ranks.sum_(counts.flatten()).view(-1, 3).tolist()
    if missing and args.use_rollout_logprobs:
        raise SlimeError(
            f"{missing} trained tokens have no log-probability of the engine; train without "
            "--use-rollout-logprobs, or give these tokens loss mask 0 (`sample.append(..., trainable=False)`)."
        )
    steps = [Step(part, *total) for part, total in zip(rows, totals, strict=True)]
    return _with_rollouts(steps, batch, trained, ranks) if args.loss_aggregation == "rollout" else steps


def _with_rollouts(steps: Sequence[Step], batch: TrainBatch, trained: IntArray, ranks: DataParallel) -> list[Step]:
    """The steps with the sizes of their rollouts, whose samples may lie on several ranks."""
    mine: list[dict[str, int]] = [{} for _ in steps]
    for counted, part in zip(mine, steps, strict=True):
        for row in part.rows.tolist():
            key = str(batch.rollout_index[row])
            counted[key] = counted.get(key, 0) + int(trained[row])
    everyone = ranks.gather({"rollouts": mine})
    made = []
    for number, part in enumerate(steps):
        sizes = Counter[str]()
        for message in everyone:
            sizes.update(message["rollouts"][number])
        tokens = [sizes[str(index)] for index in batch.rollout_index.tolist()]
        made.append(replace(part, num_rollouts=len(sizes), rollout_tokens=torch.tensor(tokens, device=ranks.device)))
    return made


def trained_tokens(batch: TrainBatch) -> IntArray:
    """[S] trained tokens of each sample."""
    running = np.concatenate([[0], np.cumsum(batch.loss_mask, dtype=np.int64)])
    ends = np.cumsum(batch.response_lengths, dtype=np.int64)
    counts: IntArray = running[ends] - running[ends - batch.response_lengths]
    return counts
