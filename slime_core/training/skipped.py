"""Gradient norms of a round's steps; the batch of a step whose gradient was not finite is kept for a look at it."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from statistics import fmean

import torch

from slime_core.training.batch import COMPUTED, TensorBatch
from slime_core.types import IntArray

DIRECTORY = "skipped_steps"
"""In the run directory."""

MAX_KEPT = 4
"""Batches that a rank keeps; a run that fails at every step does not fill the disk."""

logger = logging.getLogger(__name__)


class StepNorms:
    """The gradient norms of one model's optimiser steps in a round."""

    def __init__(self, run_dir: Path, name: str, rank: int) -> None:
        """`name` begins those of the files for steps that were not finite."""
        self._run_dir, self._name, self._rank = run_dir, name, rank
        self._finite: list[float] = []
        self.num_nonfinite = 0

    def note(self, norm: float, number: int, batch: TensorBatch, rows: IntArray) -> None:
        """Note the norm of a step, and keep its samples unless it is finite."""
        if math.isfinite(norm):
            self._finite.append(norm)
            return
        self.num_nonfinite += 1
        keep_batch(batch, rows, self._run_dir, f"{self._name}_step_{number}_rank{self._rank}")

    @property
    def mean(self) -> float:
        """Of the finite ones; 0 without any."""
        return fmean(self._finite) if self._finite else 0.0


def keep_batch(batch: TensorBatch, rows: IntArray, run_dir: Path, name: str) -> Path | None:
    """Write these samples, as the loss saw them, to `skipped_steps/NAME.pt`, for `torch.load`.

    Args:
        batch: this rank's share of the round.
        rows: the samples of the step.
        run_dir: of the run.
        name: of the file.

    Returns:
        Where it is; None where enough are kept, or the file cannot be written, which is only logged.
    """
    directory = run_dir / DIRECTORY
    path = directory / f"{name}.pt"
    some = batch.select(rows)
    fields = ("tokens", "lengths", "response_lengths", "loss_mask", "rollout_logprobs", "rewards", "group_index")
    kept = {field: getattr(some, field) for field in (*fields, "sample_index", *COMPUTED)}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        suffix = name.rsplit("_", 1)[-1]
        if len(list(directory.glob(f"*_{suffix}.pt"))) >= MAX_KEPT:
            return None
        torch.save({field: value.cpu() for field, value in kept.items() if value is not None}, path)
    except OSError as error:
        logger.warning("the batch of a skipped step cannot be kept in %s: %s", path, error)
        return None
    return path
