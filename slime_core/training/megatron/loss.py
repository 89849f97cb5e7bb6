"""Log-probabilities and entropy where every tensor-parallel rank has the logits of a part of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

PADDING = -1e30
"""The logit of a token that does not exist: its probability is 0, and 0 times its logarithm is 0."""


class _VocabParallelLogprobs(torch.autograd.Function):
    """Two small all-reduces forward, none backward: one [R, V / size] array is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        group: dist.ProcessGroup,
        vocab_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = logits.shape[-1]
        first = group.rank() * width
        every = logits.float() / temperature  # a copy: the caller's logits stay as they are
        every[:, max(0, vocab_size - first) :] = PADDING
        largest = every.max(-1).values
        _reduce(largest, dist.ReduceOp.MAX, group)
        every -= largest[:, None]
        mine = (targets >= first) & (targets < first + width)
        local = (targets - first).clamp(0, width - 1)
        chosen = torch.where(mine, every.gather(-1, local[:, None])[:, 0], 0.0)
        weights = every.exp()
        sums = torch.stack([weights.sum(-1), chosen, torch.linalg.vecdot(weights, every)])
        _reduce(sums, dist.ReduceOp.SUM, group)
        total, chosen, weighted = sums
        log_total = total.log()
        entropy = log_total - weighted / total
        every -= log_total[:, None]
        ctx.save_for_backward(every, entropy, local, mine)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        every, entropy, local, mine = ctx.saved_tensors
        of_chosen, of_entropy = grads
        # d log p[target] / d z = onehot - p;  d entropy / d z = -p (log p + entropy)
        grad = every.exp()
        if of_entropy is None:
            grad.mul_(-of_chosen[:, None] if of_chosen is not None else 0.0)
        else:
            pull = of_entropy[:, None] * (every + entropy[:, None])
            grad.mul_(pull.neg_() if of_chosen is None else pull.add_(of_chosen[:, None]).neg_())
        if of_chosen is not None:
            grad.scatter_add_(-1, local[:, None], torch.where(mine, of_chosen, 0.0)[:, None])
        return grad.div_(ctx.temperature).to(ctx.dtype), None, None, None, None


def _reduce(tensor: torch.Tensor, how: Any, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, op=how, group=group)


def vocab_parallel_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, group: dist.ProcessGroup, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy under softmax(logits / temperature), computed in float32.

    The gradient is that of a loss which every rank of the group computes alike.

    Args:
        logits: [R, V / size], this rank's part of a vocabulary that is padded to a multiple of the size.
        targets: [R] int64 token ids, the same on every rank.
        temperature: above 0.
        group: the tensor-parallel ranks, part after part.
        vocab_size: tokens that exist; the padding behind them has probability 0.

    Returns:
        Two float32 [R], in nats, the same on every rank.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _VocabParallelLogprobs.apply(
        logits, targets, temperature, group, vocab_size
    )
    return result
