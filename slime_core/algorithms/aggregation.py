"""From numbers a token to one number: means over tokens or sequences, exact under any splitting of the batch."""

from __future__ import annotations

import torch

AGGREGATIONS = ("token", "sequence", "rollout", "constant")
"""The kinds that `token_weights` knows."""


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of the values where the mask is set, a scalar; 0 when it is set nowhere. Same shape, any shape."""
    mask = mask.bool()
    return torch.where(mask, values, torch.zeros_like(values)).sum() / mask.sum().clamp(min=1)


def segment_sum(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Sum of each sample's tokens.

    Args:
        values: [R], sample after sample.
        lengths: [S] integers, tokens of each sample, summing to R.

    Returns:
        [S], 0 for a sample without tokens.
    """
    sample = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths, output_size=len(values))
    return values.new_zeros(len(lengths)).index_add(0, sample, values)


def masked_sequence_mean(values: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Mean of each sample's values where the mask is set.

    Args:
        values: [R].
        mask: [R], bool or 0/1.
        lengths: [S] integers, response tokens of each sample.

    Returns:
        [S], 0 for a sample with no token set.
    """
    mask = mask.bool()
    totals = segment_sum(torch.where(mask, values, torch.zeros_like(values)), lengths)
    return totals / segment_sum(mask.to(values.dtype), lengths).clamp(min=1)


def token_weights(
    mask: torch.Tensor,
    lengths: torch.Tensor,
    kind: str,
    total: float,
    *,
    rollout_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """What each token weighs in the loss, so that loss = sum(weights * values), however the batch is split.

    - token: 1 / total, with total the trained tokens of the whole step.
    - sequence: 1 / (trained tokens of its sample * total), with total the samples of the whole step that have any.
    - rollout: 1 / (trained tokens of its rollout * total), with total the rollouts of the whole step that have any; the
      samples of one fan-out are a rollout and weigh together what one sample does.
    - constant: 1 / total, with total the samples of the whole step times a constant; no length biases it (Liu et al.,
      "Understanding R1-Zero-Like Training", arXiv 2503.20783, section 3.2).

    Args:
        mask: [R], bool or 0/1, the trained tokens of this part of the step.
        lengths: [S] integers, response tokens of each sample of this part.
        kind: one of `AGGREGATIONS`.
        total: the denominator, counted over all parts.
        rollout_tokens: [S] trained tokens of each sample's rollout, counted over all parts; for "rollout".

    Returns:
        float32 [R], 0 where the mask is 0.

    Raises:
        ValueError: on an unknown kind, or "rollout" without `rollout_tokens`.
    """
    set_tokens = mask.to(torch.float32)
    if kind in ("token", "constant"):
        return set_tokens / total
    if kind == "rollout" and rollout_tokens is not None:
        of_rollout = rollout_tokens.to(torch.float32).clamp(min=1)
        return set_tokens / (torch.repeat_interleave(of_rollout, lengths, output_size=len(mask)) * total)
    if kind == "rollout":
        raise ValueError("aggregation by rollout needs rollout_tokens")
    if kind != "sequence":
        raise ValueError(f"unknown aggregation '{kind}'; use one of {', '.join(AGGREGATIONS)}")
    trained = segment_sum(set_tokens, lengths).clamp(min=1)
    return set_tokens / (torch.repeat_interleave(trained, lengths, output_size=len(mask)) * total)
