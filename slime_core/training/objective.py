"""The loss of a micro-batch: the plugin's term, importance correction, KL term and entropy bonus, by the options."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch

from slime_core.algorithms import importance_weights, kl_estimate, offpolicy_mask, token_weights, vetoed_sequences
from slime_core.bound import Bound, blamed
from slime_core.errors import PluginError
from slime_core.options import RatioBounds, importance_bounds
from slime_core.training.batch import TensorBatch
from slime_core.training.meters import Meters
from slime_core.training.steps import Step
from slime_core.types import IntArray

Metrics = dict[str, torch.Tensor]


@dataclass(frozen=True)
class StepLoss:
    """The loss of one optimiser step, micro-batch by micro-batch; their sum over all ranks is that of the step."""

    args: argparse.Namespace
    plugin: Bound
    step: Step
    meters: Meters
    first: bool
    """Whether this is the round's first step, in which the policy is as it was before the round."""
    mean_weight: float = 1.0
    """Of the step's importance weights, over all ranks, by which `--importance-normalize` divides them."""

    def __call__(
        self, rows: IntArray, batch: TensorBatch, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> torch.Tensor:
        """The scalar whose gradient the micro-batch adds to the step's.

        Args:
            rows: [S] the places of these samples in the round's batch.
            batch: the micro-batch; without `old_logprobs` these are the policy's own.
            logprobs: float32 [R], with gradient.
            entropy: float32 [R], with gradient.

        Raises:
            PluginError: when the plugin returns anything but a loss and metrics a token.
        """
        own = batch.old_logprobs is None
        if own:
            batch.old_logprobs = logprobs.detach()
        with blamed(self.plugin):
            given = self.plugin(args=self.args, batch=batch, logprobs=logprobs, entropy=entropy)
        losses, metrics = pair(self.plugin, given, "(loss, metrics)")
        for what, value in {"a loss": losses, **metrics}.items():
            check_per_token(self.plugin, what, value, batch.num_response_tokens)
        terms, measured = loss_terms(self.args, batch, losses.float(), logprobs, entropy, self.mean_weight)
        kind, total = self.args.loss_aggregation, self.step.denominator(self.args)
        of_rollouts = self.step.rollout_tokens
        siblings = None if of_rollouts is None else of_rollouts[torch.from_numpy(rows)]
        weights = token_weights(batch.loss_mask, batch.response_lengths, kind, total, rollout_tokens=siblings)
        # a loss may be NaN or infinite where it is not trained
        sums = {name: (torch.where(batch.loss_mask, term, 0.0) * weights).sum() for name, term in terms.items()}
        loss = torch.stack(list(sums.values())).sum()
        self.meters.add_losses({"loss": loss, **sums})
        self.meters.add({**measured, **metrics, "entropy": entropy}, batch.loss_mask)
        self.meters.add_advantages(batch)
        if self.first:
            self._compare(batch, logprobs, measured, own)
        return loss

    def _compare(self, batch: TensorBatch, logprobs: torch.Tensor, measured: Metrics, own: bool) -> None:
        """Note what must be equal before the round's first update: the engine, the old policy, a fresh reference."""
        if own or self.args.use_rollout_logprobs:
            self.meters.compare(logprobs, batch.rollout_logprobs, batch.loss_mask)
        elif batch.old_logprobs is not None:
            self.meters.add_part({"first_step_drift": (logprobs - batch.old_logprobs).abs()}, batch.loss_mask)
        if "ref_kl" in measured:
            self.meters.add_part({"first_step_ref_kl": measured["ref_kl"]}, batch.loss_mask)


def loss_terms(
    args: argparse.Namespace,
    batch: TensorBatch,
    losses: torch.Tensor,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    mean_weight: float = 1.0,
) -> tuple[dict[str, torch.Tensor], Metrics]:
    """The terms whose sum is the loss of each token, and what was measured on the way.

    - policy_loss: the plugin's, weighed by `--importance-correction`, less what `--importance-reject`,
      `--importance-veto` and `--mask-offpolicy-delta` leave out.
    - kl_loss: `--kl-loss-coef` times the divergence from the reference.
    - entropy_loss: minus `--entropy-coef` times the entropy.

    Args:
        args: the options.
        batch: the micro-batch, with `old_logprobs`.
        losses: [R], the plugin's.
        logprobs: [R], with gradient.
        entropy: [R], with gradient.
        mean_weight: what the importance weights are divided by.

    Returns:
        Terms and metrics by name, [R] each; a term that no option asks for is missing.
    """
    assert batch.old_logprobs is not None, "the trainer sets them before the loss"
    # where the engine's count as the old ones, the trainer's own are the only others
    trainers = logprobs.detach() if args.use_rollout_logprobs else batch.old_logprobs
    metrics = {"logprob": logprobs} | mismatch_metrics(trainers, batch.rollout_logprobs)
    terms = {"policy_loss": _corrected(args, batch, losses, logprobs, metrics, mean_weight)}
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
    args: argparse.Namespace,
    batch: TensorBatch,
    losses: torch.Tensor,
    logprobs: torch.Tensor,
    metrics: Metrics,
    mean_weight: float,
) -> torch.Tensor:
    mask, lengths, old = batch.loss_mask, batch.response_lengths, batch.old_logprobs
    assert old is not None
    given = correction_weights(args, batch)
    if given is not None:
        weights, outside = given
        weights = weights / mean_weight
        losses = losses * weights
        metrics |= {"importance_weight": weights, "importance_outside_fraction": outside.float()}
    if args.importance_reject:
        rejected = torch.stack([outside_bounds(batch, bounds) for bounds in args.importance_reject]).any(0)
        losses = torch.where(rejected, 0.0, losses)
        metrics["importance_rejected_fraction"] = rejected.float()
    if args.importance_veto is not None:
        vetoed = vetoed_sequences(old, batch.rollout_logprobs, mask, lengths, args.importance_veto)
        losses = torch.where(vetoed, 0.0, losses)
        metrics["importance_vetoed_fraction"] = vetoed.float()
    if args.mask_offpolicy_delta is not None and batch.advantages is not None:
        # the engine's own where it has them, so that numerics and age both count
        sampled = torch.where(batch.rollout_logprobs.isnan(), old, batch.rollout_logprobs)
        left_out = offpolicy_mask(logprobs, sampled, batch.advantages, mask, lengths, args.mask_offpolicy_delta)
        losses = torch.where(left_out, 0.0, losses)
        metrics["offpolicy_masked_fraction"] = left_out.float()
    return losses


def correction_weights(args: argparse.Namespace, batch: TensorBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The importance weights [R] that the options ask for, and where their ratio is out of bounds; None without any."""
    if args.importance_correction is None:
        return None
    low, high = importance_bounds(args)
    return _weights(batch, args.importance_correction, RatioBounds(args.importance_level, low, high))


def outside_bounds(batch: TensorBatch, bounds: RatioBounds) -> torch.Tensor:
    """Bool [R]: the tokens whose ratio, or whose sequence's, is outside."""
    return _weights(batch, "mask", bounds)[1]


def _weights(batch: TensorBatch, kind: str, bounds: RatioBounds) -> tuple[torch.Tensor, torch.Tensor]:
    old, lengths = batch.old_logprobs, batch.response_lengths
    assert old is not None, "the trainer sets them before the loss"
    within = {"level": bounds.level, "low": bounds.low, "high": bounds.high}
    return importance_weights(old, batch.rollout_logprobs, batch.loss_mask, lengths, kind=kind, **within)


def mismatch_metrics(logprobs: torch.Tensor, rollout_logprobs: torch.Tensor) -> Metrics:
    """How far the trainer is from the engine that sampled; equal where that is unknown.

    Args:
        logprobs: [R], the trainer's.
        rollout_logprobs: [R], the engine's, NaN where it has none.

    Returns:
        [R] each: `rollout_logprob`, the engine's, `mismatch_kl` (k3 of KL(engine || trainer)) and `mismatch_ratio`
        (p_trainer / p_engine).
    """
    engine = torch.where(rollout_logprobs.isnan(), logprobs, rollout_logprobs)
    ratio = torch.exp((logprobs - engine).clamp(-20.0, 20.0))
    return {
        "rollout_logprob": engine,
        "mismatch_kl": kl_estimate(engine, logprobs, "k3"),
        "mismatch_ratio": ratio,
    }


def pair(plugin: Bound, given: Any, form: str) -> tuple[Any, Any]:
    """The two things that a plugin must return.

    Raises:
        PluginError: when it returned something else.
    """
    if not isinstance(given, tuple) or len(given) != 2:
        raise PluginError(f"plugin '{plugin.name}' from {plugin.origin} must return {form} in '{plugin.hook}'.")
    return given


def check_per_token(plugin: Bound, what: str, value: Any, size: int) -> None:
    """Hold a plugin to one number a response token.

    Raises:
        PluginError: when the value is no tensor [size].
    """
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    if shape != (size,):
        raise PluginError(
            f"plugin '{plugin.name}' from {plugin.origin} gave {what} of shape {shape} in "
            f"'{plugin.hook}'; it must be a tensor with one entry a response token, ({size},)."
        )
