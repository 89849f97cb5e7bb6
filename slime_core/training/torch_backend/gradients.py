"""The gradients of a step: where they gather over micro-batches, their sum over ranks, their norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from slime_core.training.ranks import Ranks
from slime_core.training.torch_backend.sharding import local


class Gradients(Protocol):
    """The `.grad` of the tensors that the optimiser updates."""

    def zero(self) -> None:
        """Forget those of the last step."""

    def sum_over(self, ranks: Ranks) -> None:
        """Make them those of all ranks' samples; each rank must call it."""

    def norm(self, ranks: Ranks) -> float:
        """The global 2-norm, the same on every rank; each rank must call it."""

    def scale(self, factor: float) -> None:
        """Multiply all."""


class FlatGradients:
    """Of whole parameters: views of one float32 buffer, which ranks sum in one go.

    A parameter in a shorter type adds its gradient to that of its float32 master copy after every backward pass.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], masters: Sequence[torch.Tensor]) -> None:
        sizes = [master.numel() for master in masters]
        self.flat = torch.zeros(sum(sizes), dtype=torch.float32, device=masters[0].device)
        for parameter, master, view in zip(parameters, masters, self.flat.split(sizes), strict=True):
            master.grad = view.view_as(master)
            if master is not parameter:
                parameter.register_post_accumulate_grad_hook(_Hand(master))

    def zero(self) -> None:
        """Set all to 0."""
        self.flat.zero_()

    def sum_over(self, ranks: Ranks) -> None:
        """All-reduce the buffer."""
        ranks.sum_(self.flat)

    def norm(self, ranks: Ranks) -> float:
        """Of the buffer."""
        return torch.linalg.vector_norm(self.flat).item()

    def scale(self, factor: float) -> None:
        """Multiply the buffer."""
        self.flat.mul_(factor)


class _Hand:
    """Adds a parameter's gradient to its master's."""

    def __init__(self, master: torch.Tensor) -> None:
        self._master = master

    def __call__(self, parameter: torch.Tensor) -> None:
        if self._master.grad is not None and parameter.grad is not None:
            self._master.grad.add_(parameter.grad)
        parameter.grad = None


class ShardedGradients:
    """Of parameters cut up by FSDP2, which has summed them over the ranks in every backward pass."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)

    def zero(self) -> None:
        """Drop all."""
        for parameter in self._parameters:
            parameter.grad = None

    def sum_over(self, ranks: Ranks) -> None:
        """Nothing is left to do."""

    def norm(self, ranks: Ranks) -> float:
        """Of the ranks' parts, each counted once."""
        total = torch.zeros(1, dtype=torch.float64)
        parts = self._local()
        if parts:
            norms = torch._foreach_norm(parts)
            total += torch.stack(norms).double().square().sum().cpu()
        return math.sqrt(ranks.sum_(total).item())

    def scale(self, factor: float) -> None:
        """Multiply the parts."""
        parts = self._local()
        if parts:
            torch._foreach_mul_(parts, factor)

    def _local(self) -> list[torch.Tensor]:
        return [local(p.grad) for p in self._parameters if p.grad is not None and local(p.grad).numel()]
