"""Alarms: what in a round's metrics a user should act on, said once, with advice."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from typing import Any

NUM_FIRST = 5
"""Rounds whose mean later rounds are compared with."""

LARGEST_LOGPROB_DIFF = 0.1
"""Nats between engine and trainer that no numerics explain."""

GROWN, GROWN_FROM = 5.0, 0.01
"""Times that the mismatch may grow, and the mismatch (nats) below which it does not matter."""

COLLAPSED = 0.05
"""Part of the first rounds' entropy at which a policy hardly explores."""

OVER = 2.0
"""Times that a value must be back behind its bound before its alarm is over: near it, it would sound on and on."""

SAME = 1e-4
"""Divergence (nats) below which two models are the same."""

SAME_LOGPROBS = 0.02
"""Difference (nats) that bfloat16 may make between two passes of one model; half its square is the divergence."""

COMPARED = ("train/mismatch_kl", "train/entropy")
"""What later rounds are measured against the first ones by."""


class Alarms:
    """Looks at every round; an alarm that goes on sounds once, and again after it was over."""

    def __init__(self, args: argparse.Namespace, say: Callable[[str], None]) -> None:
        self._args, self._say = args, say
        self._first: dict[str, list[float]] = {}
        self._sounding: set[str] = set()

    def recall(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Compare with the first rounds of a run that is resumed, from the rows of its metrics.jsonl, in order."""
        for row in rows:
            for name in COMPARED:
                if row.get(name) is not None:  # null stands for NaN
                    self._compare(name, row)

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Say the new alarms of a round, a line each.

        Args:
            step: the round.
            metrics: by their names in docs/metrics.md; what is missing sounds no alarm.
        """
        found = {
            "rewards": _rewards(metrics),
            "gradient": _gradient(metrics),
            "engine": _engine(metrics),
            "mismatch": self._mismatch(metrics),
            "entropy": self._entropy(metrics),
            "invariants": self._invariants(step, metrics),
        }
        sounding = {name for name, message in found.items() if message is not None}
        for name in [name for name in found if name in sounding - self._sounding]:
            self._say(f"warning, round {step}: {found[name]}")
        self._sounding = sounding

    def _mismatch(self, metrics: Mapping[str, float]) -> str | None:
        first, now = self._compare("train/mismatch_kl", metrics)
        grown = GROWN / OVER if "mismatch" in self._sounding else GROWN
        if first is None or now < GROWN_FROM or now < grown * first:
            return None
        return (
            f"the mismatch between engine and trainer grew from {first:.2g} to {now:.2g} nats a token "
            "(train/mismatch_kl); such runs tend to collapse. Weigh tokens with --importance-correction tis or icepop, "
            "lower --max-staleness or --lr."
        )

    def _entropy(self, metrics: Mapping[str, float]) -> str | None:
        if "reward/max" not in metrics:
            return None  # imitation explores nothing
        first, now = self._compare("train/entropy", metrics)
        collapsed = COLLAPSED * OVER if "entropy" in self._sounding else COLLAPSED
        if first is None or now > collapsed * first:
            return None
        return (
            f"the policy's entropy fell from {first:.2g} to {now:.2g} nats a token, so that it hardly explores. If its "
            "reward is not yet what you want, try --entropy-coef, a wider --ppo-clip-eps-high, or harder prompts."
        )

    def _invariants(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Before an update policy and old policy are one model and, in the first round, so is a default reference."""
        args = self._args
        drift = metrics.get("train/first_step_drift", 0.0)
        if drift > SAME_LOGPROBS:
            return (
                f"in the round's first step the policy is {drift:.2g} nats a token from its own log-probabilities of a "
                "moment before (train/first_step_drift). Is something in the model random?"
            )
        if step > args.critic_only_rounds:
            return None
        one_step = args.num_steps_per_rollout == 1
        if one_step and not args.use_rollout_logprobs and abs(metrics.get("train/ppo_kl", 0.0)) > SAME:
            return (
                f"train/ppo_kl is {metrics['train/ppo_kl']:.2g} before any update and must be 0. Check --policy-loss."
            )
        off = metrics.get("train/first_step_ref_kl", 0.0)
        if args.ref_model is None and off > SAME_LOGPROBS**2:
            return (
                f"train/first_step_ref_kl is {off:.2g} before any update, although the reference is --model; it must "
                "be 0."
            )
        return None

    def _compare(self, name: str, metrics: Mapping[str, float]) -> tuple[float | None, float]:
        """The mean of the first rounds, None until they are over, and the value now."""
        if not math.isfinite(metrics.get(name, math.nan)):
            return None, 0.0  # another alarm's matter; it must not spoil the mean
        first = self._first.setdefault(name, [])
        if len(first) < NUM_FIRST:
            first.append(metrics[name])
            return None, metrics[name]
        return fmean(first), metrics[name]


def _rewards(metrics: Mapping[str, float]) -> str | None:
    if metrics.get("reward/min") == 0 and metrics.get("reward/max") == 0:
        return (
            "every sample of the round has a reward of 0, so that it teaches nothing. Is --reward the right one, "
            "does --label-key name the answers, is --max-response-tokens long enough? `slime score` shows how a file "
            "of responses is graded."
        )
    grouped = metrics.get("rollout/num_samples", 0) > metrics.get("rollout/num_groups", 0)
    if grouped and metrics.get("rollout/zero_std_fraction") == 1:
        return (
            "all samples of a group have the same reward, in every group of the round, so that advantages relative to "
            "the group are 0. Are the prompts too easy or too hard? `--dynamic-filter nonzero_std` draws until groups "
            "differ."
        )
    return None


def _gradient(metrics: Mapping[str, float]) -> str | None:
    skipped = metrics.get("train/nonfinite_steps", 0)
    if not skipped:
        return None
    return (
        f"the gradient of {skipped:.0f} optimiser steps was not finite; the weights were left as they were, and the "
        "batches are kept under skipped_steps/ in the run directory. A lower --lr, or --importance-correction where "
        "train/mismatch_kl is large, often helps."
    )


def _engine(metrics: Mapping[str, float]) -> str | None:
    off = metrics.get("train/logprob_abs_diff", 0.0)
    if not off > LARGEST_LOGPROB_DIFF:  # NaN is another alarm's matter
        return None
    return (
        f"the engine's log-probabilities are {off:.2g} nats a token from the trainer's (train/logprob_abs_diff). Do "
        "--dtype and --engine-dtype agree? --importance-correction tis makes up for what is left."
    )
