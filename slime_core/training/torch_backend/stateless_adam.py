"""AdamW without moments: each update is that of a fresh AdamW's first step, and needs no memory between steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class StatelessAdam(torch.optim.Optimizer):
    """p <- (1 - lr wd) p - lr g / (|g| + eps): AdamW's update where both moments start at 0 in every step.

    It saves two copies of the weights in float32. Where a round has one optimiser step, it is AdamW whose moments are
    forgotten after every round.

    Args:
        parameters: groups of them, with a `weight_decay` each.
        lr: learning rate.
        eps: added to |g|.
    """

    def __init__(self, parameters: Iterable[dict[str, Any]], lr: float, eps: float) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.addcdiv_(parameter.grad, parameter.grad.abs().add_(group["eps"]), value=-group["lr"])
