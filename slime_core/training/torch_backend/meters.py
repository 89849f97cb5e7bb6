"""What a rank measures in a round, and the round's metrics from those of all ranks."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Meters:
    """Sums over this rank's trained tokens, kept on the device until the round's end, and seconds by phase."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, torch.Tensor] = {}
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._differences = torch.zeros(3, dtype=torch.float64, device=device)
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, values: dict[str, torch.Tensor], mask: torch.Tensor) -> None:
        """Add metrics of a micro-batch, [R] each, where the mask [R] is set."""
        for name, value in values.items():
            kept = value.detach()[mask].double().sum()
            self._sums[name] = self._sums[name] + kept if name in self._sums else kept

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add a micro-batch's share of a step's loss."""
        self._loss += loss.detach().double()

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
            "loss": self._loss.item(),
            "differences": self._differences.tolist(),
            "seconds": dict(self._seconds),
        }


def round_metrics(messages: list[dict[str, Any]], num_tokens: int, num_steps: int) -> dict[str, float]:
    """The round's metrics: sums over ranks divided by trained tokens, losses averaged over the steps that trained.

    Args:
        messages: `Meters.message` of every rank.
        num_tokens: trained tokens of the round, all ranks.
        num_steps: optimiser steps that had any.
    """
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for m in messages for name in m["sums"]):
        metrics[f"train/{name}"] = sum(m["sums"].get(name, 0.0) for m in messages) / max(1, num_tokens)
    metrics["train/loss"] = sum(m["loss"] for m in messages) / max(1, num_steps)
    metrics["train/num_tokens"] = num_tokens
    total = sum(m["differences"][0] for m in messages)
    count = sum(m["differences"][1] for m in messages)
    if count:
        metrics["train/logprob_abs_diff"] = total / count
        metrics["train/logprob_abs_diff_max"] = max(m["differences"][2] for m in messages)
    for phase in dict.fromkeys(phase for m in messages for phase in m["seconds"]):
        metrics[f"perf/train_{phase}_s"] = max(m["seconds"].get(phase, 0.0) for m in messages)
    return metrics
