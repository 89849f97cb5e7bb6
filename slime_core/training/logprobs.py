"""Log-probabilities and entropy of response tokens from hidden states, without keeping more logits than needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

MAX_LOGITS = 2**26
"""Numbers in the logits of one chunk, 256 MiB in float32; a longer micro-batch recomputes them in the backward pass."""


class _TokenLogprobs(torch.autograd.Function):
    """Fused log-softmax, choice of the target and entropy: one [R, V] array is kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
        every = torch.log_softmax(scaled, -1)
        chosen = every.gather(-1, targets[:, None])[:, 0]
        entropy = -torch.linalg.vecdot(every.exp(), every)
        ctx.save_for_backward(every, targets, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        every, targets, entropy = ctx.saved_tensors
        of_chosen, of_entropy = grads
        # d log p[target] / d z = onehot - p;  d entropy / d z = -p (log p + entropy)
        grad = every.exp()
        if of_entropy is None:
            grad.mul_(-of_chosen[:, None] if of_chosen is not None else 0.0)
        else:
            pull = of_entropy[:, None] * (every + entropy[:, None])
            grad.mul_(pull.neg_() if of_chosen is None else pull.add_(of_chosen[:, None]).neg_())
        if of_chosen is not None:
            grad.scatter_add_(-1, targets[:, None], of_chosen[:, None])
        if ctx.temperature != 1.0:
            grad.div_(ctx.temperature)
        return grad.to(ctx.dtype), None, None


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy under softmax(logits / temperature), computed in float32.

    Args:
        logits: [R, V] in any floating dtype.
        targets: [R] int64 token ids.
        temperature: above 0.

    Returns:
        Two float32 [R], in nats, with gradient to the logits.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _TokenLogprobs.apply(logits, targets, temperature)
    return result


def head_logprobs(
    hidden: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    targets: torch.Tensor,
    temperature: float,
    *,
    vocab_size: int,
    max_logits: int = MAX_LOGITS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_logprobs` of head(hidden), in chunks whose logits have at most `max_logits` numbers.

    Args:
        hidden: [R, H] hidden states of the positions that predict the targets.
        head: the output layer, [n, H] -> [n, V].
        targets: [R] int64.
        temperature: above 0.
        vocab_size: V.
        max_logits: the limit.

    Returns:
        Two float32 [R].
    """
    rows = max(1, max_logits // vocab_size)
    if len(hidden) <= rows:
        return token_logprobs(head(hidden), targets, temperature)

    def chunk(states: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprobs(head(states), ids, temperature)

    pairs = zip(hidden.split(rows), targets.split(rows), strict=True)
    parts = [checkpoint(chunk, states, ids, use_reentrant=False) for states, ids in pairs]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
