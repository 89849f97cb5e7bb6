"""Log-probability of a token and entropy of the choice, fused so that one array as large as the logits is kept."""

from __future__ import annotations

from typing import Any

import torch

MAX_LOGITS = 2**26
"""Numbers in the logits of one chunk, 256 MiB in float32; a longer micro-batch recomputes them in the backward pass."""


class _TokenLogprobs(torch.autograd.Function):
    """Log-softmax, choice of the target and entropy: one [R, V] array is kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        every = torch.log_softmax(logits.float() if temperature == 1.0 else logits.float() / temperature, -1)
        chosen = every.gather(-1, targets[:, None])[:, 0]
        entropy = _entropy(every)
        ctx.save_for_backward(every, targets, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        every, targets, entropy = ctx.saved_tensors
        return _gradient(every, targets, entropy, ctx.temperature, *grads).to(ctx.dtype), None, None


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


def logits_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    of_chosen: torch.Tensor | None,
    of_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient of `token_logprobs` at its logits, computed anew with one more array of their size.

    Args:
        logits: [R, V]; their memory is used up.
        targets: [R].
        temperature: above 0.
        of_chosen: [R], at the log-probabilities; None: 0.
        of_entropy: [R], at the entropies; None: 0.

    Returns:
        [R, V] in the dtype of the logits.
    """
    every = logits.float()
    if temperature != 1.0:
        every.div_(temperature)
    # log-softmax in place, as torch computes it
    every.sub_(every.amax(-1, keepdim=True))
    every.sub_(every.exp().sum(-1, keepdim=True).log_())
    entropy = None if of_entropy is None else _entropy(every)
    return _gradient(every, targets, entropy, temperature, of_chosen, of_entropy, uses_up=True).to(logits.dtype)


def _entropy(every: torch.Tensor) -> torch.Tensor:
    # in place: vecdot would make one array more
    return -every.exp().mul_(every).sum(-1)


def _gradient(
    every: torch.Tensor,
    targets: torch.Tensor,
    entropy: torch.Tensor | None,
    temperature: float,
    of_chosen: torch.Tensor | None,
    of_entropy: torch.Tensor | None,
    *,
    uses_up: bool = False,
) -> torch.Tensor:
    """At the logits whose log-softmax is `every`; autograd may want that again unless it may be used up."""
    # d log p[target] / d z = onehot - p;  d entropy / d z = -p (log p + entropy)
    grad = every.exp()
    if of_entropy is None or entropy is None:
        grad.mul_(-of_chosen[:, None] if of_chosen is not None else 0.0)
    else:
        pull = every.add_(entropy[:, None]) if uses_up else every + entropy[:, None]
        pull.mul_(of_entropy[:, None])
        grad.mul_(pull.neg_() if of_chosen is None else pull.add_(of_chosen[:, None]).neg_())
    if of_chosen is not None:
        grad.scatter_add_(-1, targets[:, None], of_chosen[:, None])
    return grad if temperature == 1.0 else grad.div_(temperature)
