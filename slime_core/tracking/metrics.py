"""Samples to metrics: pure functions, one naming scheme, `<topic>/<what>`; docs/metrics.md lists every name.

A metric whose value does not exist (the mean reward of no reward) is left out, so that every value is a finite number.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, pstdev

import numpy as np

from slime_core.types import NO_VERSION, Group, Sample, Status

EQUAL_REWARDS = 1e-6
"""Rewards of a group closer than this count as equal."""

REPETITION_TOKENS, REPETITION_RATIO = 512, 10
"""Tokens at the end of a response that are looked at, and how many times smaller a loop makes them; prose: 2 to 4."""


def rollout_metrics(
    groups: Sequence[Group],
    *,
    dropped: Mapping[str, int] | None = None,
    failed: Mapping[str, int] | None = None,
    weight_version: int | None = None,
) -> dict[str, float]:
    """Metrics of the groups of one round.

    Args:
        groups: what is trained; samples without a reward count in lengths, not in rewards.
        dropped: reason -> groups that filters dropped.
        failed: reward plugin -> samples it failed on.
        weight_version: the trainer's version, against which staleness is counted; by default the newest in the groups.
    """
    samples = [sample for group in groups for sample in group]
    metrics = {"rollout/num_groups": float(len(groups)), "rollout/num_samples": float(len(samples))}
    metrics |= {f"rollout/dropped/{reason}": float(count) for reason, count in (dropped or {}).items()}
    metrics |= {f"reward/failed/{plugin}": float(count) for plugin, count in (failed or {}).items()}
    if not samples:
        return metrics
    metrics |= _reward_metrics(samples) | _length_metrics(samples) | _staleness_metrics(samples, weight_version)
    metrics |= _turn_metrics(samples)
    if "reward/mean" in metrics:
        chances = _pass_chances([attempts(group) for group in groups if group])
        metrics |= {f"reward/{name}": chance for name, chance in chances.items()}
    metrics["rollout/zero_std_fraction"] = fmean(has_equal_rewards(group) for group in groups)
    return metrics


def has_equal_rewards(group: Group) -> bool:
    """Whether no two rewards of the group differ, so that it teaches nothing."""
    rewards = [sample.reward for sample in group if sample.reward is not None]
    return not rewards or max(rewards) - min(rewards) <= EQUAL_REWARDS


def _reward_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    rewards = [sample.reward for sample in samples if sample.reward is not None and not sample.shares_reward]
    if not rewards:
        return {}
    metrics = {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
    }
    for plugin in sorted({name for sample in samples for name in sample.rewards}):
        given = [sample.rewards[plugin] for sample in samples if plugin in sample.rewards]
        metrics[f"reward/{plugin}/mean"] = fmean(given)
    return metrics


def _length_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    lengths = [sample.response_length for sample in samples]
    return {
        "rollout/response_length_mean": fmean(lengths),
        "rollout/response_length_median": float(median(lengths)),
        "rollout/response_length_max": float(max(lengths)),
        "rollout/response_length_min": float(min(lengths)),
        "rollout/prompt_length_mean": fmean(sample.prompt_length for sample in samples),
        "rollout/truncated_fraction": _truncated_fraction(samples),
        "rollout/repetition_fraction": fmean(repeats_itself(sample) for sample in samples),
    }


def repeats_itself(sample: Sample) -> bool:
    """Whether the response ends in a loop: its last tokens take a tenth of their memory, or less, when compressed."""
    if sample.response_length < REPETITION_TOKENS:
        return False
    last = np.ascontiguousarray(sample.tokens[-REPETITION_TOKENS:], np.int32).tobytes()
    return len(zlib.compress(last, 1)) * REPETITION_RATIO <= len(last)


def _turn_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Of the samples whose generator counts its turns and tool calls, as `multi_turn` does."""
    taken = [sample for sample in samples if sample.turn_ends]
    if not taken:
        return {}
    calls = [int(sample.metadata.get("tool_calls", 0)) for sample in taken]
    return {
        "rollout/turns_mean": fmean(len(sample.turn_ends) for sample in taken),
        "rollout/tool_calls_mean": fmean(calls),
        "rollout/tool_use_fraction": fmean(count > 0 for count in calls),
        "rollout/failed_tool_calls": float(sum(int(s.metadata.get("failed_tool_calls", 0)) for s in taken)),
    }


def _truncated_fraction(samples: Sequence[Sample]) -> float:
    return fmean(sample.status is Status.TRUNCATED for sample in samples)


def _staleness_metrics(samples: Sequence[Sample], weight_version: int | None) -> dict[str, float]:
    """How many weight versions the trained tokens lag; tokens that no engine sampled have none."""
    trained = [sample.weight_versions[(sample.loss_mask > 0)] for sample in samples]
    versions = np.concatenate(trained)
    versions = versions[versions != NO_VERSION]
    if versions.size == 0:
        return {}
    lag = (int(versions.max()) if weight_version is None else weight_version) - versions
    return {"rollout/staleness_mean": float(lag.mean()), "rollout/staleness_max": float(lag.max())}


# --- evaluation -------------------------------------------------------------------------------------------------------
def eval_metrics(name: str, groups: Sequence[Group], n: int | None = None) -> dict[str, float]:
    """Metrics `eval/<name>/...` of one data set, every prompt weighing the same.

    A FAILED sample counts as wrong, a reward of 0. Samples that one rollout fanned out are one attempt, with their mean
    reward. An attempt is correct when its reward is at least 1.

    Args:
        name: of the data set.
        groups: all samples of each prompt.
        n: attempts a prompt; by default those of the smallest group. pass@k is given for the powers of two up to n.
    """
    samples = [sample for group in groups for sample in group]
    if not samples:
        return {}
    tries = [attempts(group) for group in groups if group]
    metrics = {
        "mean": fmean(map(fmean, tries)),
        "failed_fraction": fmean(sample.status is Status.FAILED for sample in samples),
        "truncated_fraction": _truncated_fraction(samples),
        "response_length_mean": fmean(sample.response_length for sample in samples),
    }
    metrics |= _pass_chances(tries, n)
    return {f"eval/{name}/{key}": value for key, value in metrics.items()}


def _pass_chances(tries: Sequence[Sequence[float]], n: int | None = None) -> dict[str, float]:
    """`pass@<k>` of prompts, given the rewards of their attempts, for the powers of two up to n, or to the fewest."""
    found = {}
    for k in powers_of_two(min(map(len, tries)) if n is None else n):
        if estimates := [pass_at_k(len(t), sum(r >= 1 for r in t), k) for t in tries if len(t) >= k]:
            found[f"pass@{k}"] = fmean(estimates)
    return found


def attempts(group: Group) -> list[float]:
    """The reward of each rollout of a group, in order; a sample without a reward counts 0."""
    rollouts: dict[tuple[str, int], list[float]] = {}
    for position, sample in enumerate(group):
        numbered = sample.rollout_index >= 0
        key = ("rollout", sample.rollout_index) if numbered else ("position", position)
        rollouts.setdefault(key, []).append(0.0 if sample.reward is None else sample.reward)
    return [fmean(rewards) for rewards in rollouts.values()]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that one of k attempts is correct, estimated without bias from n attempts of which c are.

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1: 1 - C(n - c, k) / C(n, k).

    Raises:
        ValueError: unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} correct in {n} attempts is not defined")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def powers_of_two(largest: int) -> Iterable[int]:
    """1, 2, 4, ... up to `largest`."""
    return (1 << power for power in range(largest.bit_length()))


# --- performance ------------------------------------------------------------------------------------------------------
def perf_metrics(
    durations: Mapping[str, float], *, train_tokens: float = 0.0, num_trainers: int = 1
) -> dict[str, float]:
    """Metrics of the seconds that the phases of a round took, as `Timer.lap` gives them.

    Args:
        durations: by phase; `step` is the whole round.
        train_tokens: what the phase `train` got through, for its speed.
        num_trainers: devices that did.
    """
    metrics = {f"perf/{phase}_s": seconds for phase, seconds in durations.items()}
    seconds = durations.get("train", 0.0)
    if train_tokens and seconds > 0:
        metrics["perf/train_tokens_per_s"] = train_tokens / seconds
        metrics["perf/train_tokens_per_s_per_device"] = train_tokens / seconds / max(1, num_trainers)
    if seconds > 0 and durations.get("step", 0.0) > 0:
        metrics["perf/wait_fraction"] = durations.get("rollout", 0.0) / durations["step"]
    return metrics
