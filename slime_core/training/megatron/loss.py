"""Log-probabilities and entropy where every tensor-parallel rank has the logits of a part of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _VocabParallelLogprobs(torch.autograd.Function):
    """Three small all-reduces forward, none backward: one [R, V / size] array is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        group: dist.ProcessGroup,
        vocab_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rank, width = group.rank(), logits.shape[-1]
        # a copy: the caller's logits stay as they are
        scaled = logits.float() / temperature
        known = min(width, max(0, vocab_size - rank * width))
        scaled[:, known:] = float("-inf")
        largest = scaled.max(-1).values if width else scaled.new_full((len(scaled),), float("-inf"))
        _reduce(largest, dist.ReduceOp.MAX, group)
        scaled -= largest[:, None]
        local = targets - rank * width
        mine = (local >= 0) & (local < width)
        local = local.clamp(0, max(0, width - 1))
        chosen = torch.where(mine, scaled.gather(-1, local[:, None])[:, 0], 0.0)
        weights = scaled.exp()
        # sum p z with 0 * -inf = 0 at the padding
        weighted = torch.linalg.vecdot(weights[:, :known], scaled[:, :known])
        sums = torch.stack([weights.sum(-1), chosen, weighted])
        _reduce(sums, dist.ReduceOp.SUM, group)
        total, chosen, weighted = sums
        log_total = total.log()
        weights /= total[:, None]
        entropy = log_total - weighted / total
        # log p = scaled - log_total; at the padding p is 0 and its logarithm is never used
        scaled -= log_total[:, None]
        scaled[:, known:] = 0.0
        ctx.save_for_backward(weights, scaled, entropy, local, mine)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        weights, logs, entropy, local, mine = ctx.saved_tensors
        of_chosen, of_entropy = grads
        # d log p[target] / d z = onehot - p;  d entropy / d z = -p (log p + entropy)
        grad = torch.zeros_like(weights)
        if of_chosen is not None:
            grad.addcmul_(weights, of_chosen[:, None], value=-1.0)
            grad.scatter_add_(-1, local[:, None], torch.where(mine, of_chosen, 0.0)[:, None])
        if of_entropy is not None:
            grad.addcmul_(weights * (logs + entropy[:, None]), of_entropy[:, None], value=-1.0)
        return (grad / ctx.temperature).to(ctx.dtype), None, None, None, None


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
