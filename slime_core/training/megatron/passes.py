"""Forward and backward of a round's samples through a cut model; every rank must make the same calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime_core.training.batch import TensorBatch, micro_batches
from slime_core.training.megatron.model import MegatronModel, Row
from slime_core.training.ranks import Ranks
from slime_core.types import IntArray


def shares(batch: TensorBatch, rows: IntArray, data_parallel: Ranks, max_tokens: int) -> list[IntArray]:
    """Micro-batches of these samples.

    There are as many on every data-parallel rank, and at least one: experts and gradients are exchanged in each.
    """
    mine = micro_batches(batch.host.lengths, rows, max_tokens)
    missing = data_parallel.most(max(1, len(mine))) - len(mine)
    return mine + [np.zeros(0, np.int64)] * missing


def evaluate(model: MegatronModel, batch: TensorBatch, parts: Sequence[IntArray]) -> torch.Tensor:
    """The first of the model's outputs [R] at these samples, 0 at the others, without gradient; on every stage."""
    found = torch.zeros_like(batch.rollout_logprobs)
    responses = torch.from_numpy(batch.host.response_lengths.astype(np.int64))
    by_sample = list(found.split(responses.tolist()))

    def keep(number: int, output: torch.Tensor, *others: torch.Tensor) -> None:
        some = parts[number]
        for row, values in zip(some, output.split(responses[some].tolist()), strict=True):
            by_sample[row].copy_(values)

    model.run([Row.of(batch.select(some)) for some in parts], keep, backward=False)
    return on_every_stage(found)


def differentiate(
    model: MegatronModel, batch: TensorBatch, parts: Sequence[IntArray], loss: Callable[..., torch.Tensor]
) -> None:
    """Add the gradient of a loss, micro-batch by micro-batch, through all stages.

    Args:
        model: in Megatron's data parallelism.
        batch: the round's samples.
        parts: positions of each micro-batch.
        loss: (positions, micro-batch, the model's outputs [R]...) -> scalar; called on the last stage.
    """
    selected = [batch.select(some) for some in parts]

    def scalar(number: int, *outputs: torch.Tensor) -> torch.Tensor:
        return loss(parts[number], selected[number], *outputs)

    model.run([Row.of(part) for part in selected], scalar, backward=True)


def on_every_stage(values: torch.Tensor) -> torch.Tensor:
    """What the last pipeline stage found, in place of what the others have."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(values, last, group=parallel_state.get_pipeline_model_parallel_group())
    return values
