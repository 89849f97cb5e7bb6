"""One round of training, the same for every backend: old log-probabilities, advantages, then step after step."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from slime_core.algorithms import kl_estimate, weight_sums, whiten
from slime_core.bound import blamed
from slime_core.errors import OptionError, SlimeError
from slime_core.options import compares_old_logprobs
from slime_core.plugins import Plugins
from slime_core.tracking.flops import ModelFlops
from slime_core.training.batch import TensorBatch, without_truncated
from slime_core.training.meters import Meters, round_metrics
from slime_core.training.objective import StepLoss, check_per_token, correction_weights, pair
from slime_core.training.ranks import DataParallel
from slime_core.training.skipped import StepNorms
from slime_core.training.steps import Step, round_steps, trained_tokens
from slime_core.types import IntArray, Shard

MicroLoss = Callable[[IntArray, TensorBatch, torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows, micro-batch, logprobs [R], entropy [R]) -> the scalar to differentiate; see `StepLoss`."""


class Critic(Protocol):
    """A model that tells what return to expect; see `torch_backend.critic`."""

    def values(self, batch: TensorBatch, rows: IntArray) -> torch.Tensor:
        """[R], 0 at samples that are not among the rows."""

    def train_step(self, batch: TensorBatch, rows: IntArray, meters: Meters) -> float | None:
        """One optimiser step towards the batch's returns, unless the gradient is not finite; its norm.

        None where no sample of the step has a reward, on every rank.
        """


class Backend(Protocol):
    """A model on this rank, or a part of it, and how it computes. Every rank gets the same calls in the same order.

    Where a model is cut into pipeline stages, only the last calls the loss; log-probabilities reach every stage.
    """

    @property
    def ranks(self) -> DataParallel:
        """Those that share the round's samples with this one."""

    @property
    def critic(self) -> Critic | None:
        """None without `--critic`."""

    @property
    def lr(self) -> float:
        """Of the next step."""

    def logprobs(self, batch: TensorBatch, rows: IntArray) -> torch.Tensor:
        """Of the policy at these samples, without gradient: float32 [R], 0 at the others."""

    def reference_logprobs(self, batch: TensorBatch, rows: IntArray) -> torch.Tensor | None:
        """Those of the reference; None where no option asks for one."""

    def teacher_logprobs(self, batch: TensorBatch, rows: IntArray) -> torch.Tensor | None:
        """Those of the teacher; None where no option asks for one."""

    def backward(self, batch: TensorBatch, rows: IntArray, loss: MicroLoss) -> None:
        """Set the gradients to those of the loss at these samples, summed over micro-batches."""

    def update(self) -> float:
        """Sum the gradients over the ranks and update, unless they are not finite; their norm."""

    def skip(self) -> None:
        """Go on in the schedule without an update."""

    def renew_reference(self) -> None:
        """Make the policy's present weights the reference's."""


class Round:
    """Trains rounds on a backend with the plugins that the options name."""

    def __init__(self, args: argparse.Namespace, backend: Backend, plugins: Plugins) -> None:
        self._args, self._backend, self._ranks = args, backend, backend.ranks
        self._flops = _flops(args.model)
        self._estimate = plugins.bind("estimate_advantages", args.advantage_estimator)
        self._loss = plugins.bind("policy_loss", args.policy_loss)

    def train(self, step: int, shard: Shard) -> dict[str, float]:
        """Train one round; the metrics are the same on every rank.

        Raises:
            SlimeError: when the round lacks what the chosen estimator or loss needs.
        """
        args, backend, critic = self._args, self._backend, self._backend.critic
        meters = Meters(self._ranks.device)
        if args.mask_truncated:
            shard = replace(shard, batch=without_truncated(shard.batch))
        batch = TensorBatch.of(shard.batch, self._ranks.device)
        batch.sum_over_ranks = self._ranks.sum_
        steps = round_steps(args, shard, self._ranks)
        rows = np.concatenate([part.rows for part in steps])
        with meters.clock("frozen_logprobs"):
            self._set_frozen_logprobs(batch, rows)
        with meters.clock("old_logprobs"):
            self._set_old_logprobs(batch, rows, len(steps), meters)
        if critic is not None:
            with meters.clock("values"):
                batch.values = critic.values(batch, rows)
        with meters.clock("advantages"):
            self._set_advantages(batch, shard)
        run_dir, name, rank = Path(args.runs_dir) / args.run_name, f"round_{step:06d}", self._ranks.rank
        norms, critic_norms = StepNorms(run_dir, name, rank), StepNorms(run_dir, f"{name}_critic", rank)
        empty = 0
        lr = backend.lr
        mean_weights = self._mean_weights(batch, steps)
        for number, part in enumerate(steps):
            lr = backend.lr
            if critic is not None and batch.returns is not None:
                with meters.clock("critic"):
                    critic_norm = critic.train_step(batch, part.rows, meters)
                    if critic_norm is not None:
                        critic_norms.note(critic_norm, number, batch, part.rows)
                if step < args.critic_only_rounds:
                    continue
            with meters.clock("forward_backward"):
                loss = StepLoss(args, self._loss, part, meters, number == 0, mean_weights[number])
                backend.backward(batch, part.rows, loss)
            if self._flops is not None:
                meters.add_flops(float(self._flops.of_sequences(shard.batch.lengths[part.rows]).sum()))
            with meters.clock("optimizer"):
                norm = self._update(part)
            if part.num_tokens:
                norms.note(norm, number, batch, part.rows)
            else:
                empty += 1
        trained = [part for part in steps if part.num_tokens]
        num_tokens = sum(part.num_tokens for part in trained)
        messages = self._ranks.gather(meters.message())
        metrics = round_metrics(messages, num_tokens, len(trained), args.num_trainers)
        if args.ref_update_interval is not None and (step + 1) % args.ref_update_interval == 0:
            backend.renew_reference()
        nonfinite = norms.num_nonfinite + critic_norms.num_nonfinite
        metrics |= {"train/skipped_steps": float(empty + nonfinite), "train/nonfinite_steps": float(nonfinite)}
        if critic is not None:
            metrics["train/critic_grad_norm"] = critic_norms.mean
        return metrics | {"train/grad_norm": norms.mean, "train/lr": lr}

    def early_logprobs(self, shard: Shard) -> dict[str, Any]:
        """What `train` will need of the reference and of the present policy; see `Trainer.early_logprobs`."""
        batch = TensorBatch.of(shard.batch, self._ranks.device)
        chosen = trained_tokens(shard.batch) > 0
        rows = np.flatnonzero(chosen)
        found = {"ref_logprobs": self._backend.reference_logprobs(batch, rows)}
        if compares_old_logprobs(self._args, self._args.num_steps_per_rollout):
            found["old_logprobs"] = self._backend.logprobs(batch, rows)
        left_out = ~np.repeat(chosen, shard.batch.response_lengths)
        answer: dict[str, Any] = {
            "sample_index": shard.batch.sample_index,
            "response_lengths": shard.batch.response_lengths,
        }
        for name, values in found.items():
            if values is not None:
                answer[name] = np.where(left_out, np.nan, values.cpu().numpy()).astype(np.float32)
        return answer

    def _update(self, part: Step) -> float:
        """Update, or skip a step that trains nothing; the gradient norm."""
        if part.num_tokens:
            return self._backend.update()
        self._backend.skip()
        return 0.0

    def _set_frozen_logprobs(self, batch: TensorBatch, rows: IntArray) -> None:
        """Those of the reference and of the teacher, where the options name them."""
        batch.ref_logprobs = _completed(batch, rows, "ref_logprobs", self._backend.reference_logprobs)
        taught = self._backend.teacher_logprobs(batch, rows)
        if taught is not None:
            batch.teacher_logprobs = taught

    def _set_old_logprobs(self, batch: TensorBatch, rows: IntArray, num_steps: int, meters: Meters) -> None:
        """The engine's, or those of the policy before the first of several steps; one step finds them in its loss.

        An estimator that compares the policy with a frozen model has them at once.
        """
        if self._args.use_rollout_logprobs:
            # NaN is left on tokens that are not trained, where it would still poison the gradient
            batch.old_logprobs = batch.rollout_logprobs.nan_to_num(0.0)
        elif compares_old_logprobs(self._args, num_steps) or batch.teacher_logprobs is not None:
            # with old ones that a converter brought the experts would be unknown
            own = self._backend.logprobs
            batch.old_logprobs = (
                own(batch, rows) if self._args.routing_replay else _completed(batch, rows, "old_logprobs", own)
            )
            meters.compare(batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask)

    def _mean_weights(self, batch: TensorBatch, steps: Sequence[Step]) -> list[float]:
        """Of each step's importance weights, over all ranks; 1 without `--importance-normalize`."""
        given = correction_weights(self._args, batch) if self._args.importance_normalize else None
        if given is None:
            return [1.0] * len(steps)
        level = self._args.importance_level
        of_samples = weight_sums(given[0].double(), batch.loss_mask, batch.response_lengths, level)
        mine = [of_samples[torch.from_numpy(part.rows).to(batch.device)].sum() for part in steps]
        totals = self._ranks.sum_(torch.stack(mine)).tolist()
        counts = [part.num_tokens if level == "token" else part.num_sequences for part in steps]
        return [total / count if total else 1.0 for total, count in zip(totals, counts, strict=True)]

    def _set_advantages(self, batch: TensorBatch, shard: Shard) -> None:
        """Ask the estimator, unless the round has neither a reward nor a teacher (demonstrations)."""
        if np.isnan(shard.round_rewards).all() and batch.teacher_logprobs is None:
            return
        if batch.ref_logprobs is not None and batch.old_logprobs is not None and self._args.kl_coef:
            penalty = kl_estimate(batch.old_logprobs, batch.ref_logprobs, self._args.kl_type)
            batch.kl_penalty = torch.where(batch.loss_mask, self._args.kl_coef * penalty, 0.0)
        rewards = torch.from_numpy(shard.round_rewards.astype(np.float64)).to(batch.device)
        groups = torch.from_numpy(shard.round_group_index.astype(np.int64)).to(batch.device)
        with torch.no_grad(), blamed(self._estimate):
            given = self._estimate(args=self._args, batch=batch, round_rewards=rewards, round_group_index=groups)
        advantages, returns = pair(self._estimate, given, "(advantages, returns)")
        for what, value in (("advantages", advantages), ("returns", returns)):
            check_per_token(self._estimate, what, value, batch.num_response_tokens)
        if self._args.teacher_kl_coef:
            advantages = advantages - self._args.teacher_kl_coef * _from_teacher(batch)
        if self._args.whiten_advantages:
            taught = batch.loss_mask
            if batch.teacher_logprobs is None:
                taught = taught & batch.expand(~batch.rewards.isnan())
            advantages = whiten(advantages.float(), taught, sum_over_ranks=batch.sum_over_ranks)
        batch.advantages, batch.returns = advantages.float(), returns.float()


def _from_teacher(batch: TensorBatch) -> torch.Tensor:
    """[R], log p_old - log p_teacher, 0 where the teacher's is unknown.

    Raises:
        SlimeError: when there is no teacher.
    """
    if batch.teacher_logprobs is None or batch.old_logprobs is None:
        raise SlimeError(
            "--teacher-kl-coef needs a teacher; name one with --teacher-model, or give its log-probabilities as the "
            "extra key 'teacher_logprobs' of --convert-train-data, one a response token."
        )
    return (batch.old_logprobs - batch.teacher_logprobs).nan_to_num(0.0)


def _flops(directory: str) -> ModelFlops | None:
    """What the model computes; None where its config.json does not tell, and `perf/train_tflops` is left out."""
    try:
        return ModelFlops.of(directory)
    except OptionError:
        return None


def _completed(
    batch: TensorBatch, rows: IntArray, name: str, compute: Callable[[TensorBatch, IntArray], torch.Tensor | None]
) -> torch.Tensor | None:
    """Log-probabilities [R] at these samples: those that came with the batch, and computed where they are NaN."""
    if name not in batch:
        return compute(batch, rows)
    known: torch.Tensor = batch[name]
    unknown = np.repeat(np.arange(batch.num_samples), batch.host.response_lengths)[known.isnan().cpu().numpy()]
    fresh = compute(batch, rows[np.isin(rows, unknown)])
    return None if fresh is None else torch.where(known.isnan(), fresh, known)
