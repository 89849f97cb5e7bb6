"""Evaluation: every row of a data set, sampled and scored by the run's own stages, sharing no state with training."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from slime_core.engines.client import EngineClient
from slime_core.options import NamedPath, Options
from slime_core.rollout.generate import sampling_params
from slime_core.rollout.rows import PromptFile, open_prompt_file
from slime_core.rollout.source import longest_prompt, tokenize
from slime_core.rollout.stages import Stages, gather
from slime_core.rollout.tally import Tally
from slime_core.tracking.metrics import eval_metrics
from slime_core.types import Group, Sample


@dataclass(frozen=True)
class EvalDataset:
    """A data set to evaluate on."""

    name: str
    file: PromptFile


def open_eval_datasets(args: Options) -> list[EvalDataset]:
    """The files of --eval-data, all rows checked."""
    return [EvalDataset(entry.name, _open(args, entry)) for entry in args.eval_data]


def _open(args: Options, entry: NamedPath) -> PromptFile:
    return open_prompt_file(args, entry.path)


def eval_sampling_params(args: Options) -> dict[str, Any]:
    """The sampling parameters of evaluation: the run's, with the --eval-* flags over them."""
    over = {
        "temperature": args.eval_temperature,
        "top_p": args.eval_top_p,
        "max_new_tokens": args.eval_max_response_tokens,
    }
    return sampling_params(args) | {key: value for key, value in over.items() if value is not None}


async def evaluate(args: Options, dataset: EvalDataset, stages: Stages) -> dict[str, float]:
    """Metrics `eval/<name>/...` of one data set; prompts too long for the context are counted and left out."""
    indices = itertools.count()
    tally = Tally(num_wanted=len(dataset.file))
    stages = replace(stages, tally=tally, evaluation=True, take_index=lambda: next(indices))
    groups = _groups(args, dataset, stages.engine, indices)
    too_long = len(dataset.file) - len(groups)
    params = eval_sampling_params(args)
    finished = await gather(stages.run_group(group, params) for group in groups)
    metrics = eval_metrics(dataset.name, finished)
    return metrics | ({f"eval/{dataset.name}/too_long": float(too_long)} if too_long else {})


def _groups(args: Options, dataset: EvalDataset, engine: EngineClient, indices: itertools.count[int]) -> list[Group]:
    groups = []
    for row in range(len(dataset.file)):
        prompt = dataset.file.sample(args, row, dataset.name)
        tokenize(args, engine, prompt)
        if len(prompt.tokens) <= longest_prompt(args, engine):
            groups.append([_numbered(prompt, row, next(indices)) for _ in range(args.eval_n_samples_per_prompt)])
    return groups


def _numbered(prompt: Sample, group_index: int, index: int) -> Sample:
    sample = prompt.clone()
    sample.group_index, sample.index, sample.rollout_index = group_index, index, index
    return sample
