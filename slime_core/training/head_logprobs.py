"""Log-probabilities and entropy from hidden states through a large output layer, a chunk of logits at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slime_core.training.logit_scaling import LogitScaling
from slime_core.training.logprobs import MAX_LOGITS, logits_gradient, token_logprobs

UNSCALED = LogitScaling()


def head_logprobs(
    hidden: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    targets: torch.Tensor,
    temperature: float,
    *,
    vocab_size: int,
    scaling: LogitScaling = UNSCALED,
    max_logits: int = MAX_LOGITS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_logprobs` of scaling(head(hidden)), in chunks whose logits have at most `max_logits` numbers.

    Args:
        hidden: [R, H] hidden states of the positions that predict the targets.
        head: the output layer, [n, H] -> [n, V].
        targets: [R] int64.
        temperature: above 0.
        vocab_size: V.
        scaling: what the model does to the layer's output.
        max_logits: the limit.

    Returns:
        Two float32 [R].
    """
    rows = max(1, max_logits // vocab_size)
    if len(hidden) <= rows:
        return token_logprobs(scaling(head(hidden)), targets, temperature)
    if type(head) is nn.Linear:
        found: tuple[torch.Tensor, torch.Tensor] = _LinearLogprobs.apply(
            hidden, head.weight, head.bias, targets, temperature, scaling, rows
        )
        return found

    def chunk(states: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprobs(scaling(head(states)), ids, temperature)

    pairs = zip(hidden.split(rows), targets.split(rows), strict=True)
    parts = [checkpoint(chunk, states, ids, use_reentrant=False) for states, ids in pairs]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


class _LinearLogprobs(torch.autograd.Function):
    """Chunks through one linear layer. Autograd would make a gradient as large as its weight for every chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        scaling: LogitScaling,
        rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.temperature, ctx.scaling, ctx.rows = temperature, scaling, rows
        ctx.set_materialize_grads(False)
        parts = [
            token_logprobs(scaling(nn.functional.linear(states, weight, bias)), ids, temperature)
            for states, ids in zip(hidden.split(rows), targets.split(rows), strict=True)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        hidden, weight, bias, targets = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight = torch.zeros_like(weight) if wants_weight else None
        of_bias = torch.zeros_like(bias) if wants_bias else None
        for start in range(0, len(hidden), ctx.rows):
            here = slice(start, start + ctx.rows)
            states = hidden[here]
            grad = _logits_gradient(
                ctx, states, weight, bias, targets[here], *(g if g is None else g[here] for g in grads)
            )
            if of_hidden is not None:
                torch.mm(grad, weight, out=of_hidden[here])
            if of_weight is not None:
                of_weight.addmm_(grad.T, states)
            if of_bias is not None:
                of_bias += grad.sum(0)
            del grad  # before the next chunk's logits
        return of_hidden, of_weight, of_bias, None, None, None, None


def _logits_gradient(
    ctx: Any,
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *grads: torch.Tensor | None,
) -> torch.Tensor:
    """[n, V], at a chunk's logits as the layer gives them."""
    scaled = ctx.scaling(nn.functional.linear(states, weight, bias))
    slope = ctx.scaling.slope(scaled)
    grad = logits_gradient(scaled, targets, ctx.temperature, *grads)
    return grad if slope is None else grad.mul_(slope)
