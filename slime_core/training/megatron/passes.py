"""Forward and backward of a round's samples through a cut model; every rank must make the same calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime_core.training.batch import TensorBatch, micro_batches
from slime_core.training.megatron.model import MegatronModel, Row
from slime_core.training.megatron.routing import RoutingReplay
from slime_core.training.ranks import Ranks
from slime_core.types import IntArray


def shares(batch: TensorBatch, rows: IntArray, data_parallel: Ranks, max_tokens: int) -> list[IntArray]:
    """Micro-batches of these samples.

    There are as many on every data-parallel rank, and at least one: experts and gradients are exchanged in each.
    """
    mine = micro_batches(batch.host.lengths, rows, max_tokens)
    missing = data_parallel.most(max(1, len(mine))) - len(mine)
    return mine + [np.zeros(0, np.int64)] * missing


def evaluate(
    model: MegatronModel, batch: TensorBatch, parts: Sequence[IntArray], routing: RoutingReplay | None = None
) -> torch.Tensor:
    """The first of the model's outputs [R] at these samples, 0 at the others, without gradient; on every stage.

    Args:
        model: a policy, a frozen model or a critic.
        batch: the round's samples.
        parts: positions of each micro-batch.
        routing: remembers where tokens go; None where nobody has to.
    """
    found = torch.zeros_like(batch.rollout_logprobs)
    responses = torch.from_numpy(batch.host.response_lengths.astype(np.int64))
    by_sample = list(found.split(responses.tolist()))

    def keep(number: int, output: torch.Tensor, *others: torch.Tensor) -> None:
        some = parts[number]
        for row, values in zip(some, output.split(responses[some].tolist()), strict=True):
            by_sample[row].copy_(values)

    def note(number: int, experts: torch.Tensor) -> None:
        if routing is not None:
            routing.keep(parts[number], batch.host.lengths[parts[number]], experts)

    rows = [Row.of(batch.select(some)) for some in parts]
    model.run(rows, keep, backward=False, note=None if routing is None else note)
    return on_every_stage(found)


def differentiate(
    model: MegatronModel,
    batch: TensorBatch,
    parts: Sequence[IntArray],
    loss: Callable[..., torch.Tensor],
    routing: RoutingReplay | None = None,
) -> None:
    """Add the gradient of a loss, micro-batch by micro-batch, through all stages.

    Args:
        model: in Megatron's data parallelism.
        batch: the round's samples.
        parts: positions of each micro-batch.
        loss: (positions, micro-batch, the model's outputs [R]...) -> scalar; called on the last stage.
        routing: sends tokens where they went in `evaluate`; None where they go as they choose.
    """
    selected = [batch.select(some) for some in parts]

    def scalar(number: int, *outputs: torch.Tensor) -> torch.Tensor:
        return loss(parts[number], selected[number], *outputs)

    experts = [None if routing is None else routing.kept(some) for some in parts]
    model.run([Row.of(*of_row) for of_row in zip(selected, experts, strict=True)], scalar, backward=True)


def on_every_stage(values: torch.Tensor) -> torch.Tensor:
    """What the last pipeline stage found, in place of what the others have."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(values, last, group=parallel_state.get_pipeline_model_parallel_group())
    return values
