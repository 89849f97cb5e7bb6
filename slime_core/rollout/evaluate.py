"""Evaluation: every row of a data set, sampled and scored by the run's own stages, sharing no state with training."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from slime_core.bound import Bound, blamed
from slime_core.options import EvalData, Options
from slime_core.plugins import plugin_name
from slime_core.rollout.buffer import members
from slime_core.rollout.collected import check_groups
from slime_core.rollout.generate import Generators, sampling_params
from slime_core.rollout.rows import PromptFile, open_prompt_file
from slime_core.rollout.source import longest_prompt
from slime_core.rollout.stages import Stages
from slime_core.tracking.metrics import eval_metrics
from slime_core.types import Group


@dataclass(frozen=True)
class EvalDataset:
    """A data set to evaluate on, with the settings of its own."""

    entry: EvalData
    file: PromptFile
    generate: Bound | None
    """Its own generator, if it names one."""


@dataclass(frozen=True)
class EvalSource:
    """What the `rollout` hook gets as `source` in an evaluation."""

    name: str
    groups: list[Group]
    """A group a row, ready to be generated."""


def open_eval_datasets(args: Options, bind: Callable[[str, str], Bound]) -> list[EvalDataset]:
    """The files of --eval-data, all rows checked."""
    return [
        EvalDataset(
            entry, open_prompt_file(args, entry.path), bind("generate", entry.generate) if entry.generate else None
        )
        for entry in args.eval_data
    ]


def eval_sampling_params(args: Options, entry: EvalData) -> dict[str, Any]:
    """The sampling parameters of a data set: the run's, under the --eval-* flags, under the data set's own."""
    over = {
        "temperature": (args.eval_temperature, entry.temperature),
        "top_p": (args.eval_top_p, entry.top_p),
        "top_k": (None, entry.top_k),
        "max_new_tokens": (args.eval_max_response_tokens, entry.max_response_tokens),
    }
    return sampling_params(args) | {key: v for key, values in over.items() for v in values if v is not None}


async def evaluate(args: Options, dataset: EvalDataset, rollout: Bound, stages: Stages, step: int) -> dict[str, float]:
    """Metrics `eval/<name>/...` of one data set; prompts too long for the context are counted and left out.

    `stages` are the run's, anew for this data set.
    """
    entry = dataset.entry
    groups, unreadable = await asyncio.to_thread(_groups, args, dataset, stages)
    spare_indices = itertools.count(sum(map(len, groups)))
    stages = replace(
        stages,
        evaluation=True,
        params=eval_sampling_params(args, entry),
        take_index=lambda: next(spare_indices),
    )
    if dataset.generate is not None:
        own = {plugin_name(dataset.generate.name): dataset.generate}
        stages = replace(stages, generators=Generators(None, own))
    if entry.reward is not None:
        stages = replace(stages, rewards=stages.rewards.only(entry.reward))
    source = EvalSource(entry.name, groups)
    with blamed(rollout):
        finished = await rollout(
            args=args, step=step, source=source, engine=stages.engine, stages=stages, evaluation=True
        )
    check_groups(rollout, finished, may_be_empty=True)
    metrics = await asyncio.to_thread(eval_metrics, entry.name, finished)
    too_long = len(dataset.file) - len(groups) - unreadable
    counts = {"too_long": too_long, "bad_rows": dataset.file.num_bad_rows + unreadable}
    return metrics | {f"eval/{entry.name}/{key}": float(count) for key, count in counts.items() if count}


def _groups(args: Options, dataset: EvalDataset, stages: Stages) -> tuple[list[Group], int]:
    """The prompts that can be asked, and how many cannot be read."""
    groups, unreadable = [], 0
    num_samples = dataset.entry.n_samples_per_prompt or args.eval_n_samples_per_prompt
    for row in range(len(dataset.file)):
        prompt = dataset.file.sample(args, row, dataset.entry.name)
        if not stages.prompts.readable(prompt):
            unreadable += 1
            continue
        prompt.processed = None  # for training alone, and large
        if len(prompt.tokens) <= longest_prompt(args, stages.engine):
            prompt.group_index, prompt.index = row, num_samples * len(groups)
            groups.append(members(prompt, num_samples))
    return groups, unreadable
