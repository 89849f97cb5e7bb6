"""What every loss gets besides its own term: importance correction, KL term and entropy bonus, by the options."""

from __future__ import annotations

import argparse

import torch

from slime_core.algorithms import importance_weights, kl_estimate, offpolicy_mask
from slime_core.options import importance_bounds
from slime_core.training.batch import TensorBatch

Metrics = dict[str, torch.Tensor]


def loss_terms(
    args: argparse.Namespace, batch: TensorBatch, losses: torch.Tensor, logprobs: torch.Tensor, entropy: torch.Tensor
) -> tuple[dict[str, torch.Tensor], Metrics]:
    """The terms whose sum is the loss of each token, and what was measured on the way.

    - policy_loss: the plugin's, weighed by `--importance-correction`, less what `--mask-offpolicy-delta` leaves out.
    - kl_loss: `--kl-loss-coef` times the divergence from the reference.
    - entropy_loss: minus `--entropy-coef` times the entropy.

    Args:
        args: the options.
        batch: the micro-batch, with `old_logprobs`.
        losses: [R], the plugin's.
        logprobs: [R], with gradient.
        entropy: [R], with gradient.

    Returns:
        Terms and metrics by name, [R] each; a term that no option asks for is missing.
    """
    assert batch.old_logprobs is not None, "the trainer sets them before the loss"
    metrics = {"logprob": logprobs} | mismatch_metrics(batch.old_logprobs, batch.rollout_logprobs)
    terms = {"policy_loss": _corrected(args, batch, losses, logprobs, metrics)}
    if batch.ref_logprobs is not None:
        # a token that is not trained must not overflow: its gradient would be 0 times infinity
        reference = torch.where(batch.loss_mask, batch.ref_logprobs, logprobs.detach())
        metrics |= {"ref_logprob": reference, "ref_kl": kl_estimate(logprobs.detach(), reference, "k3")}
        if args.kl_loss_coef:
            sampled = batch.old_logprobs if args.kl_loss_unbiased else None
            divergence = kl_estimate(logprobs, reference, args.kl_loss_type, sampled_logprobs=sampled)
            terms["kl_loss"] = args.kl_loss_coef * divergence
    if args.entropy_coef:
        terms["entropy_loss"] = -args.entropy_coef * entropy
    return terms, metrics


def _corrected(
    args: argparse.Namespace, batch: TensorBatch, losses: torch.Tensor, logprobs: torch.Tensor, metrics: Metrics
) -> torch.Tensor:
    mask, lengths = batch.loss_mask, batch.response_lengths
    assert batch.old_logprobs is not None
    if args.importance_correction is not None:
        low, high = importance_bounds(args)
        weights, outside = importance_weights(
            batch.old_logprobs,
            batch.rollout_logprobs,
            mask,
            lengths,
            kind=args.importance_correction,
            level=args.importance_level,
            low=low,
            high=high,
        )
        losses = losses * weights
        metrics |= {"importance_weight": weights, "importance_outside_fraction": outside.float()}
    if args.mask_offpolicy_delta is not None and batch.advantages is not None:
        # the engine's own where it has them, so that numerics and age both count
        sampled = torch.where(batch.rollout_logprobs.isnan(), batch.old_logprobs, batch.rollout_logprobs)
        left_out = offpolicy_mask(logprobs, sampled, batch.advantages, mask, lengths, args.mask_offpolicy_delta)
        losses = torch.where(left_out, 0.0, losses)
        metrics["offpolicy_masked_fraction"] = left_out.float()
    return losses


def mismatch_metrics(old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor) -> Metrics:
    """How far the trainer is from the engine that sampled, before the round's first update; equal where it is unknown.

    Args:
        old_logprobs: [R], the trainer's.
        rollout_logprobs: [R], the engine's, NaN where it has none.

    Returns:
        [R] each: `mismatch_kl` (k3 of KL(engine || trainer)) and `mismatch_ratio` (p_trainer / p_engine).
    """
    engine = torch.where(rollout_logprobs.isnan(), old_logprobs, rollout_logprobs)
    ratio = torch.exp((old_logprobs - engine).clamp(-20.0, 20.0))
    return {"mismatch_kl": kl_estimate(engine, old_logprobs, "k3"), "mismatch_ratio": ratio}
