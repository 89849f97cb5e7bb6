"""What a rank measures in a round, and the round's metrics from those of all ranks."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from slime_core.training.batch import TensorBatch


class Meters:
    """Sums over this rank's trained tokens, kept on the device until the round's end, and seconds by phase."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, torch.Tensor] = {}
        self._losses: dict[str, torch.Tensor] = {}
        self._parts: dict[str, torch.Tensor] = {}
        self._differences = torch.zeros(3, dtype=torch.float64, device=device)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._flops = 0.0

    def add_flops(self, flops: float) -> None:
        """Add the operations of forward and backward passes."""
        self._flops += flops

    def add(self, values: dict[str, torch.Tensor], mask: torch.Tensor) -> None:
        """Add metrics of a micro-batch, [R] each, where the mask [R] is set."""
        for name, value in values.items():
            # not value[mask], whose size the host would have to wait for
            kept = torch.where(mask, value.detach(), 0.0).sum(dtype=torch.float64)
            self._sums[name] = self._sums[name] + kept if name in self._sums else kept

    def add_part(self, values: dict[str, torch.Tensor], mask: torch.Tensor) -> None:
        """Add metrics that only some trained tokens have, [R] each, where the mask [R] is set: means over those."""
        for name, value in values.items():
            kept = torch.where(mask, value.detach(), 0.0).sum(dtype=torch.float64)
            found = torch.stack([kept, mask.sum(dtype=torch.float64)])
            self._parts[name] = self._parts[name] + found if name in self._parts else found

    def add_losses(self, losses: dict[str, torch.Tensor]) -> None:
        """Add a micro-batch's share of a step's loss and of its terms, scalars."""
        for name, loss in losses.items():
            share = loss.detach().double()
            self._losses[name] = self._losses[name] + share if name in self._losses else share

    def add_advantages(self, batch: TensorBatch) -> None:
        """Add the advantages and returns of a micro-batch, and the teacher's log-probabilities, where it has them."""
        if batch.advantages is not None and batch.returns is not None:
            known = {"advantage": batch.advantages, "advantage_square": batch.advantages.square()}
            self.add({**known, "return": batch.returns}, batch.loss_mask)
        if batch.teacher_logprobs is not None and batch.old_logprobs is not None:
            off = (batch.old_logprobs - batch.teacher_logprobs).nan_to_num(0.0)
            self.add({"opd_reverse_kl": off}, batch.loss_mask)
            known_tokens = batch.loss_mask & ~batch.teacher_logprobs.isnan()
            self.add_part({"teacher_logprob": batch.teacher_logprobs}, known_tokens)

    def compare(self, logprobs: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor) -> None:
        """Note how far the trainer's log-probabilities are from the engine's, where it has any and the mask is set."""
        known = mask & ~engine.isnan()
        off = (logprobs.detach() - engine)[known].abs().double()
        if off.numel():
            self._differences[0] += off.sum()
            self._differences[1] += off.numel()
            self._differences[2] = torch.maximum(self._differences[2], off.max())

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Count the seconds of the body to a phase."""
        began = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._seconds[phase] += time.perf_counter() - began

    def message(self) -> dict[str, Any]:
        """What the other ranks must know, JSON-able."""
        return {
            "sums": {name: value.item() for name, value in self._sums.items()},
            "parts": {name: value.tolist() for name, value in self._parts.items()},
            "losses": {name: value.item() for name, value in self._losses.items()},
            "differences": self._differences.tolist(),
            "seconds": dict(self._seconds),
            "flops": self._flops,
        }


def round_metrics(
    messages: list[dict[str, Any]], num_tokens: int, num_steps: int, num_devices: int = 1
) -> dict[str, float]:
    """The round's metrics: sums over ranks divided by trained tokens, losses averaged over the steps that trained.

    What only some tokens have is divided by their number, and left out where none had it.

    Args:
        messages: `Meters.message` of every rank.
        num_tokens: trained tokens of the round, all ranks.
        num_steps: optimiser steps that had any.
        num_devices: that computed, all ranks.
    """
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for m in messages for name in m["sums"]):
        metrics[f"train/{name}"] = sum(m["sums"].get(name, 0.0) for m in messages) / max(1, num_tokens)
    for name in dict.fromkeys(name for m in messages for name in m["parts"]):
        part, count = (sum(m["parts"].get(name, (0.0, 0.0))[i] for m in messages) for i in (0, 1))
        if count:
            metrics[f"train/{name}"] = part / count
    if "train/advantage" in metrics:
        square, mean = metrics.pop("train/advantage_square"), metrics.pop("train/advantage")
        metrics |= {"train/advantage_mean": mean, "train/advantage_std": math.sqrt(max(0.0, square - mean * mean))}
    for name in dict.fromkeys(["loss", *(name for m in messages for name in m["losses"])]):
        metrics[f"train/{name}"] = sum(m["losses"].get(name, 0.0) for m in messages) / max(1, num_steps)
    metrics["train/num_tokens"] = num_tokens
    total = sum(m["differences"][0] for m in messages)
    count = sum(m["differences"][1] for m in messages)
    if count:
        metrics["train/logprob_abs_diff"] = total / count
        metrics["train/logprob_abs_diff_max"] = max(m["differences"][2] for m in messages)
    for phase in dict.fromkeys(phase for m in messages for phase in m["seconds"]):
        metrics[f"perf/train_{phase}_s"] = max(m["seconds"].get(phase, 0.0) for m in messages)
    flops, seconds = sum(m["flops"] for m in messages), metrics.get("perf/train_forward_backward_s", 0.0)
    if flops and seconds > 0:
        metrics["perf/train_tflops"] = flops / seconds / num_devices / 1e12
    return metrics
