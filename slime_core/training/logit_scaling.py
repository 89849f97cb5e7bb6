"""What some models do to the logits of their output layer: a factor (Cohere, Granite), a bound (Gemma 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class LogitScaling:
    """logits -> softcap * tanh(multiplier * logits / divisor / softcap), as the model's own forward computes it."""

    multiplier: float = 1.0
    divisor: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitScaling:
        """The one that a model's config describes in the names that transformers' models use."""
        multiplier = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None)
        divisor = getattr(config, "logits_scaling", None)
        return cls(multiplier or 1.0, divisor or 1.0, getattr(config, "final_logit_softcapping", None) or None)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """The scaled logits, of the same shape, by the operations of the models' own forward: bit for bit theirs."""
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def slope(self, scaled: torch.Tensor) -> torch.Tensor | float | None:
        """What a gradient at the scaled logits is multiplied by to be one at the output layer's; None: 1.

        Args:
            scaled: what `__call__` returned.
        """
        factor = self.multiplier / self.divisor
        if self.softcap is None:
            return None if factor == 1.0 else factor
        # d tanh(x) = 1 - tanh(x)^2
        return scaled.div(self.softcap).square_().neg_().add_(1.0).mul_(factor)
