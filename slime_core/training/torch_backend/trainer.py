"""TorchTrainer: one data-parallel rank that trains a transformers model with plain torch."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime_core.algorithms import kl_estimate, token_weights, whiten
from slime_core.bound import Bound, blamed
from slime_core.errors import CheckpointError, PluginError, SlimeError
from slime_core.plugins import load_plugins
from slime_core.training.batch import TensorBatch, micro_batches, without_truncated
from slime_core.training.objective import loss_terms
from slime_core.training.torch_backend import checkpoint
from slime_core.training.torch_backend.critic import Critic
from slime_core.training.torch_backend.frozen import Frozen
from slime_core.training.torch_backend.meters import Meters, round_metrics
from slime_core.training.torch_backend.model import Policy, load_policy, named_weights
from slime_core.training.torch_backend.optimizer import Optimizer
from slime_core.training.torch_backend.ranks import Ranks
from slime_core.training.torch_backend.skipped import keep_batch
from slime_core.types import FloatArray, IntArray, Shard, TrainBatch

CPU_MICRO_BATCH = 4096
"""Tokens of a micro-batch on CPU, where smaller arrays stay in the caches; `--max-tokens-per-gpu` may be less."""


@dataclass(frozen=True)
class Step:
    """One optimiser step: this rank's samples that train, and the size of the whole."""

    rows: IntArray
    num_tokens: int
    """Trained tokens, all ranks."""
    num_sequences: int
    """Samples with a trained token, all ranks."""
    num_samples: int
    """All of them, all ranks."""
    num_rollouts: int = 0
    """Rollouts with a trained token, all ranks; counted under `--loss-aggregation rollout`."""
    rollout_tokens: torch.Tensor | None = None
    """[S] trained tokens, all ranks, of the rollout that each sample of this rank's batch belongs to; likewise."""

    def denominator(self, args: argparse.Namespace) -> float:
        """What the sum of the step's losses is divided by."""
        if args.loss_aggregation == "constant":
            constant = args.max_response_tokens if args.loss_constant is None else args.loss_constant
            return float(self.num_samples * constant)
        return {"token": self.num_tokens, "sequence": self.num_sequences, "rollout": self.num_rollouts}[
            args.loss_aggregation
        ]


class TorchTrainer:
    """A rank of the torch backend; see `slime_core.training.trainer.Trainer` for what its methods promise."""

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        rank: int,
        world_size: int,
        master_address: str,
        master_port: int,
        device: str,
    ) -> None:
        if args.trainer_threads is not None:
            torch.set_num_threads(args.trainer_threads)
        torch.manual_seed(args.seed)
        self._args = args
        self._device = torch.device(device)
        self._plugins = load_plugins(args, [args.advantage_estimator, args.policy_loss])
        self._estimate = self._plugins.bind("estimate_advantages", args.advantage_estimator)
        self._loss = self._plugins.bind("policy_loss", args.policy_loss)
        self._policy = load_policy(args, self._device)
        self._frozen = Frozen(args, self._device)
        self._optimizer = Optimizer(args, self._policy.model)
        self._ranks = Ranks.join(rank, world_size, address=master_address, port=master_port, device=self._device)
        on_cpu = self._device.type == "cpu"
        self._max_tokens = min(args.max_tokens_per_gpu, CPU_MICRO_BATCH) if on_cpu else args.max_tokens_per_gpu
        self._critic = Critic(args, self._device, self._ranks, self._max_tokens) if args.critic else None

    # --- a round ------------------------------------------------------------------------------------------------------
    def train(self, step: int, shard: Shard) -> dict[str, float]:
        """Train one round; the metrics are the same on every rank."""
        meters = Meters(self._device)
        if self._args.mask_truncated:
            shard = replace(shard, batch=without_truncated(shard.batch))
        batch = TensorBatch.of(shard.batch, self._device)
        batch.sum_over_ranks = self._ranks.sum_
        steps = self._steps(shard)
        with meters.clock("frozen_logprobs"):
            self._set_frozen_logprobs(batch, steps)
        with meters.clock("old_logprobs"):
            self._set_old_logprobs(batch, steps, meters)
        if self._critic is not None:
            with meters.clock("values"):
                batch.values = self._critic.values(batch, np.concatenate([part.rows for part in steps]))
        with meters.clock("advantages"):
            self._set_advantages(batch, shard)
        compared = batch.old_logprobs is not None and not self._args.use_rollout_logprobs
        norms: list[float] = []
        skipped = nonfinite = 0
        lr = self._optimizer.lr
        for number, part in enumerate(steps):
            lr = self._optimizer.lr
            if self._critic is not None and batch.returns is not None:
                with meters.clock("critic"):
                    self._critic.train_step(batch, part.rows, meters)
                if step < self._args.critic_only_rounds:
                    continue
            with meters.clock("forward_backward"):
                self._optimizer.zero_grad()
                self._accumulate(batch, part, meters, compare=number == 0 and not compared)
            with meters.clock("optimizer"):
                norm = self._update(part)
            if not math.isfinite(norm):
                nonfinite += 1
                name = f"round_{step:06d}_step_{number}_rank{self._ranks.rank}"
                keep_batch(batch, part.rows, Path(self._args.runs_dir) / self._args.run_name, name)
            norms += [norm] if math.isfinite(norm) and part.num_tokens else []
            skipped += not (math.isfinite(norm) and part.num_tokens)
        trained = [part for part in steps if part.num_tokens]
        metrics = round_metrics(
            self._ranks.gather(meters.message()), sum(part.num_tokens for part in trained), len(trained)
        )
        if self._args.ref_update_interval is not None and (step + 1) % self._args.ref_update_interval == 0:
            self._frozen.renew_reference(self._policy.model)
        grad_norm = sum(norms) / len(norms) if norms else 0.0
        metrics |= {"train/skipped_steps": float(skipped), "train/nonfinite_steps": float(nonfinite)}
        return metrics | {"train/grad_norm": grad_norm, "train/lr": lr}

    def _steps(self, shard: Shard) -> list[Step]:
        """The round's optimiser steps with their sizes over all ranks, which make the loss exact."""
        batch = shard.batch
        trained = trained_tokens(batch)
        starts = [0, *shard.step_ends[:-1]]
        spans = [np.arange(start, end) for start, end in zip(starts, shard.step_ends, strict=True)]
        rows = [span[trained[span] > 0] for span in spans]
        unknown = int((np.isnan(batch.rollout_logprobs) & (batch.loss_mask > 0)).sum())
        sizes = [[int(trained[part].sum()), len(part), len(span)] for part, span in zip(rows, spans, strict=True)]
        counts = torch.tensor([*sizes, [unknown, 0, 0]], dtype=torch.int64, device=self._device)
        *totals, (missing, *_) = self._ranks.sum_(counts.flatten()).view(-1, 3).tolist()
        if missing and self._args.use_rollout_logprobs:
            raise SlimeError(
                f"{missing} trained tokens have no log-probability of the engine; train without "
                "--use-rollout-logprobs, or give these tokens loss mask 0 (`sample.append(..., trainable=False)`)."
            )
        made = [Step(part, *total) for part, total in zip(rows, totals, strict=True)]
        return self._with_rollouts(made, batch, trained) if self._args.loss_aggregation == "rollout" else made

    def _with_rollouts(self, steps: list[Step], batch: TrainBatch, trained: IntArray) -> list[Step]:
        """The steps with the sizes of their rollouts, whose samples may lie on several ranks."""
        mine: list[dict[str, int]] = [{} for _ in steps]
        for counted, part in zip(mine, steps, strict=True):
            for row in part.rows.tolist():
                key = str(batch.rollout_index[row])
                counted[key] = counted.get(key, 0) + int(trained[row])
        everyone = self._ranks.gather({"rollouts": mine})
        made = []
        for number, part in enumerate(steps):
            sizes = Counter[str]()
            for message in everyone:
                sizes.update(message["rollouts"][number])
            tokens = [sizes[str(index)] for index in batch.rollout_index.tolist()]
            made.append(
                replace(part, num_rollouts=len(sizes), rollout_tokens=torch.tensor(tokens, device=self._device))
            )
        return made

    def _set_advantages(self, batch: TensorBatch, shard: Shard) -> None:
        """Ask the estimator, unless the round has neither a reward nor a teacher (demonstrations)."""
        if np.isnan(shard.round_rewards).all() and batch.teacher_logprobs is None:
            return
        if batch.ref_logprobs is not None and batch.old_logprobs is not None and self._args.kl_coef:
            penalty = kl_estimate(batch.old_logprobs, batch.ref_logprobs, self._args.kl_type)
            batch.kl_penalty = torch.where(batch.loss_mask, self._args.kl_coef * penalty, 0.0)
        rewards = torch.from_numpy(shard.round_rewards.astype(np.float64)).to(self._device)
        groups = torch.from_numpy(shard.round_group_index.astype(np.int64)).to(self._device)
        with torch.no_grad(), blamed(self._estimate):
            given = self._estimate(args=self._args, batch=batch, round_rewards=rewards, round_group_index=groups)
        advantages, returns = _pair(self._estimate, given, "(advantages, returns)")
        for what, value in (("advantages", advantages), ("returns", returns)):
            _check_per_token(self._estimate, what, value, batch.num_response_tokens)
        if self._args.whiten_advantages:
            taught = batch.loss_mask
            if batch.teacher_logprobs is None:
                taught = taught & batch.expand(~batch.rewards.isnan())
            advantages = whiten(advantages.float(), taught, sum_over_ranks=batch.sum_over_ranks)
        batch.advantages, batch.returns = advantages.float(), returns.float()

    def _set_frozen_logprobs(self, batch: TensorBatch, steps: list[Step]) -> None:
        """Those of the reference and of the teacher, where the options name them."""
        rows = np.concatenate([part.rows for part in steps])
        if self._frozen.reference is not None:
            batch.ref_logprobs = self._recompute(self._frozen.reference, batch, rows)
        if self._frozen.teacher is not None:
            batch.teacher_logprobs = self._recompute(self._frozen.teacher, batch, rows)

    def _set_old_logprobs(self, batch: TensorBatch, steps: list[Step], meters: Meters) -> None:
        """The engine's, or those of the policy before the first of several steps; one step finds them in its loss.

        An estimator that compares the policy with a frozen model has them at once.
        """
        if self._args.use_rollout_logprobs:
            # NaN is left on tokens that are not trained, where it would still poison the gradient
            batch.old_logprobs = batch.rollout_logprobs.nan_to_num(0.0)
        elif len(steps) > 1 or self._args.kl_coef or batch.teacher_logprobs is not None:
            batch.old_logprobs = self._recompute(self._policy, batch, np.concatenate([part.rows for part in steps]))
            meters.compare(batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask)

    def _recompute(self, policy: Policy, batch: TensorBatch, rows: IntArray) -> torch.Tensor:
        """Log-probabilities [R] of a model at these samples, 0 at the others."""
        parts = torch.zeros_like(batch.rollout_logprobs)
        responses = torch.from_numpy(batch.host.response_lengths.astype(np.int64))
        by_sample = list(parts.split(responses.tolist()))
        with torch.no_grad():
            for some in micro_batches(batch.host.lengths, rows, self._max_tokens):
                logprobs, _ = policy.logprobs(batch.select(some))
                for row, values in zip(some, logprobs.split(responses[some].tolist()), strict=True):
                    by_sample[row].copy_(values)
        return parts

    def _accumulate(self, batch: TensorBatch, part: Step, meters: Meters, *, compare: bool) -> None:
        """Forward and backward of this rank's share of a step, micro-batch by micro-batch."""
        kind, total = self._args.loss_aggregation, part.denominator(self._args)
        for rows in micro_batches(batch.host.lengths, part.rows, self._max_tokens):
            some = batch.select(rows)
            logprobs, entropy = self._policy.logprobs(some)
            if some.old_logprobs is None:
                some.old_logprobs = logprobs.detach()
            with blamed(self._loss):
                given = self._loss(args=self._args, batch=some, logprobs=logprobs, entropy=entropy)
            losses, metrics = _pair(self._loss, given, "(loss, metrics)")
            for what, value in {"a loss": losses, **metrics}.items():
                _check_per_token(self._loss, what, value, some.num_response_tokens)
            terms, measured = loss_terms(self._args, some, losses.float(), logprobs, entropy)
            siblings = None if part.rollout_tokens is None else part.rollout_tokens[torch.from_numpy(rows)]
            weights = token_weights(some.loss_mask, some.response_lengths, kind, total, rollout_tokens=siblings)
            # a loss may be NaN or infinite where it is not trained
            sums = {name: (torch.where(some.loss_mask, term, 0.0) * weights).sum() for name, term in terms.items()}
            loss = torch.stack(list(sums.values())).sum()
            loss.backward()
            meters.add_losses({"loss": loss, **sums})
            meters.add({**measured, **metrics, "entropy": entropy}, some.loss_mask)
            meters.add_advantages(some)
            if compare:
                meters.compare(logprobs, some.rollout_logprobs, some.loss_mask)

    def _update(self, part: Step) -> float:
        """Sum the gradients over the ranks and update, or skip; the gradient norm."""
        if not part.num_tokens:
            self._optimizer.skip()
            return 0.0
        for flat in self._optimizer.gradients:
            self._ranks.sum_(flat)
        norm = self._optimizer.grad_norm()
        if math.isfinite(norm):
            self._optimizer.step(norm)
        else:
            self._optimizer.skip()
        return norm

    # --- weights and checkpoints --------------------------------------------------------------------------------------
    def weights(self, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights for the engines, under Hugging Face names."""
        return named_weights(self._policy.model, getattr(torch, dtype))

    def prompt_logprobs(self, tokens: Sequence[int]) -> FloatArray:
        """Log-probabilities [n - 1] of a prompt's tokens under the present weights."""
        logprobs: FloatArray = self._policy.prompt_logprobs(tokens).cpu().numpy()
        return logprobs

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        return int(self._policy.model.config.get_text_config().vocab_size)

    @property
    def dtype(self) -> str:
        """Of the weights, for example `float32`."""
        return str(self._policy.model.dtype).removeprefix("torch.")

    def save(self, directory: Path) -> None:
        """Write model and training state; the ranks' weights and optimisers are equal, so rank 0 writes them."""
        try:
            if self._ranks.rank == 0:
                checkpoint.save_model(self._policy.model, Path(self._args.model), directory)
                checkpoint.save_state({"optimizer": self._optimizer.state_dict()}, directory, "state")
                self._frozen.save(directory)
                if self._critic is not None:
                    self._critic.save(directory)
            checkpoint.save_state({"rng": torch.get_rng_state()}, directory, f"rank_{self._ranks.rank}")
        except OSError as error:
            raise CheckpointError(f"the checkpoint {directory} cannot be written: {error}") from error

    def load(self, directory: Path) -> None:
        """Go on from a checkpoint; a rank it did not have keeps its fresh random state."""
        checkpoint.load_model(self._policy.model, directory)
        self._frozen.load(directory)
        if self._critic is not None:
            self._critic.load(directory, self._device)
        state = checkpoint.load_state(directory, "state", self._device)
        try:
            self._optimizer.load_state_dict(state["optimizer"])
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"the training state in {directory} does not fit: {error}; resume with the options of the run."
            ) from None
        own = f"rank_{self._ranks.rank}"
        if (directory / checkpoint.TRAINER / f"{own}.pt").is_file():
            torch.set_rng_state(checkpoint.load_state(directory, own, torch.device("cpu"))["rng"])

    def close(self) -> None:
        """Leave the process group and close the plugins."""
        self._plugins.close()
        self._ranks.leave()


def trained_tokens(batch: TrainBatch) -> IntArray:
    """[S] trained tokens of each sample."""
    running = np.concatenate([[0], np.cumsum(batch.loss_mask, dtype=np.int64)])
    ends = np.cumsum(batch.response_lengths, dtype=np.int64)
    counts: IntArray = running[ends] - running[ends - batch.response_lengths]
    return counts


def _pair(plugin: Bound, given: Any, form: str) -> tuple[Any, Any]:
    if not isinstance(given, tuple) or len(given) != 2:
        raise PluginError(f"plugin '{plugin.name}' from {plugin.origin} must return {form} in '{plugin.hook}'.")
    return given


def _check_per_token(plugin: Bound, what: str, value: Any, size: int) -> None:
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    if shape != (size,):
        raise PluginError(
            f"plugin '{plugin.name}' from {plugin.origin} gave {what} of shape {shape} in "
            f"'{plugin.hook}'; it must be a tensor with one entry a response token, ({size},)."
        )
