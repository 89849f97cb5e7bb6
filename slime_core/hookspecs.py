"""The hook contract, in data-path order: what a plugin may implement, when it is called and in which process.

An implementation takes the arguments it needs, by these names. `args` holds every option, the plugin's own included.
`def` and `async def` below are part of the contract: `async def` means I/O and runs on the event loop under a timeout;
a plain `def reward` means CPU work and runs in a worker process; other plain hooks run on a worker thread. `reward`
and `group_reward` may be either.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import pluggy

from slime_core.types import Drop, Group, Sample, TrainBatch

if TYPE_CHECKING:
    import torch

CONTRACT_VERSION = 1
"""Grows when an argument is renamed or removed; a new argument or hook leaves it as it is."""

PROJECT = "slime"
"""The entry-point group and pluggy's project name."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

HOOKS_WITH_EXAMPLES = (
    "get_samples", "generate", "reward", "group_reward", "dynamic_filter", "over_sampling_filter", "buffer_filter",
    "convert_train_data", "rollout", "estimate_advantages", "policy_loss", "log_metrics",
)  # fmt: skip
"""Hooks that `slime new-plugin` writes an example of: all but the set-up."""

EITHER_COLOUR = frozenset({"reward", "group_reward"})
"""Hooks that a plugin implements as `def` (CPU work, worker process) or `async def` (I/O, event loop)."""


# --- set-up -----------------------------------------------------------------------------------------------------------
@hookspec
def add_options(parser: argparse._ArgumentGroup) -> None:
    """Add the plugin's own flags, each starting with `--<plugin>-`.

    Called once, in the driver, before the options are parsed; for a class plugin it is a static method.
    """


@hookspec
def configure(args: argparse.Namespace) -> None:
    """Check or prepare what the plugin needs; raise `OptionError` for a wrong option.

    Called once in every process that uses the plugin, after the options are parsed; where it is a module's function or
    a class's static method, in the driver too, before anything is started.
    """


# --- data path --------------------------------------------------------------------------------------------------------
@hookspec
def get_samples(args: argparse.Namespace, state: dict[str, Any], num_prompts: int) -> list[Sample]:
    """Return `num_prompts` samples, one a prompt; the core clones each to `n_samples_per_prompt`.

    Called when the buffer is short of groups, on a thread of the rollout manager. `state` is a JSON-able dict that the
    core saves with every checkpoint and gives back on resume: keep the cursor there, nowhere else.
    """


@hookspec
async def generate(
    args: argparse.Namespace, engine: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> list[Sample]:
    """Return the finished samples made from `sample`: usually `[sample]`, several for a fan-out.

    Called once a sample, concurrently, on the event loop of the rollout manager. `engine.generate(tokens,
    sampling_params)` asks the policy and gives a `Generation`; `sample.append_generation` adds it. When a round has
    enough, requests end early: return such a sample ABORTED, as `append_generation` leaves it. Under
    `--partial-rollout` it comes back, still ABORTED and each branch of a fan-out by itself; go on from `sample.tokens`.
    Such a branch, but not the first of its rollout, may return [] when a sibling has taken over. What takes longer than
    `--generate-timeout-s` is cancelled, its sample FAILED. An exception ends the run: to give up one sample, call
    `sample.fail(reason)` and return it.
    """


@hookspec
def reward(args: argparse.Namespace, sample: Sample, engine: Any) -> float | dict[str, float]:
    """Return the sample's reward, or a dict whose key `reward` is summed and whose other numbers are logged.

    Called as each sample finishes: `def` in a worker process, killed after `--reward-timeout-s`, with `engine` None;
    `async def` on the event loop, under the same timeout, with an `engine` to ask the policy; `engine.frozen["judge"]`
    asks the model that `--frozen-model judge=DIR` names. An error, a timeout, None or NaN makes the sample FAILED,
    never a reward of 0. For a sample of several turns the dict may hold `turn_rewards`, a list with a number a turn,
    which estimators can use.
    """


@hookspec
def group_reward(args: argparse.Namespace, samples: Group, engine: Any) -> list[float]:
    """Return one reward a sample, in order, for a whole group.

    Called when every sample of the group is finished; runs as `reward` does.
    """


@hookspec
def dynamic_filter(args: argparse.Namespace, samples: Group) -> Drop | None:
    """Return `Drop(reason)` to refuse a finished group, None to keep it.

    Called once a finished, scored group, on a thread of the rollout manager, filter after filter; the first objection
    drops. `Drop(reason, spare=True)` lets the group be used when too few remain.
    """


@hookspec
def over_sampling_filter(args: argparse.Namespace, groups: list[Group], num_groups: int) -> list[Group]:
    """Return the groups best first; the first `num_groups` are trained, the others are dropped and counted.

    Called once a round when `--over-sampling-filter` is set, on a thread of the rollout manager.
    """


@hookspec
def buffer_filter(args: argparse.Namespace, groups: list[Group], num_groups: int) -> list[Group]:
    """Return the at most `num_groups` of these waiting groups that are taken next.

    Called when groups wait in the buffer, on a thread of the rollout manager. Pure: what it does not return keeps
    waiting.
    """


@hookspec
def convert_train_data(args: argparse.Namespace, groups: list[Group]) -> TrainBatch:
    """Return the round as a TrainBatch with raw rewards; `TrainBatch.from_samples` does most of it.

    Called once a round, on a thread of the rollout manager. Extra keys in `per_sample` and `per_token` reach the loss.
    Sorting by index, splitting over ranks and normalising are the core's work.
    """


@hookspec
async def rollout(
    args: argparse.Namespace, step: int, source: Any, engine: Any, stages: Any, evaluation: bool
) -> list[Group]:
    """Return the groups of one training round, or of one evaluation; replaces the whole collection.

    Called once a round (`--rollout`) and once an evaluation data set (`--eval-rollout`, with `evaluation` True), on the
    event loop of the rollout manager. `await source.get_groups(n)` draws and `source.add_groups` puts back, in an
    evaluation `source.groups` holds every group; `await stages.run_group(group)` generates and scores one as the flags
    say.
    Returned groups that were not drawn are numbered and counted as drawn; failed samples leave their groups.
    """


# --- training ---------------------------------------------------------------------------------------------------------
@hookspec
def estimate_advantages(
    args: argparse.Namespace, batch: Any, round_rewards: torch.Tensor, round_group_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns, float32 [R] each: one a response token of this rank's `batch`.

    Called once a round on every trainer rank. `round_rewards` (float64 [S], NaN where a sample has none) and
    `round_group_index` (int64 [S]) are those of the whole round, all ranks together; `batch.sum_over_ranks(tensor)`
    sums over the ranks, which must all call it. Take off `batch.kl_penalty`, 0 without `--kl-coef`.
    """


@hookspec
def policy_loss(
    args: argparse.Namespace, batch: Any, logprobs: torch.Tensor, entropy: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of each response token, float32 [R], and metrics by name, [R] each.

    Called once a micro-batch on every trainer rank; `logprobs` and `entropy` are the current policy's, with gradient.
    The core applies the loss mask, adds what its own flags ask for (importance correction, KL, entropy), and averages
    losses over the whole optimiser step, metrics over the round's trained tokens.
    """


# --- tracking ---------------------------------------------------------------------------------------------------------
@hookspec
def log_metrics(args: argparse.Namespace, step: int, metrics: dict[str, Any]) -> None:
    """Record the metrics of one round or evaluation.

    Called in the driver, every `--tracker` in turn. Keys look like `reward/mean`; values are numbers.
    """
