"""The convert stage: groups to a TrainBatch, sorted by index, and its split over data-parallel ranks."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import numpy.typing as npt

from slime_core.bound import Bound, blamed
from slime_core.errors import PluginError
from slime_core.options import Options
from slime_core.types import Group, Sample, Shard, TrainBatch


def convert(args: Options, bound: Bound, groups: list[Group]) -> TrainBatch:
    """The plugin's TrainBatch, checked, its samples sorted by group and index; for a worker thread.

    Raises:
        PluginError: when the plugin returns anything else, or arrays that do not fit together.
    """
    # in order from the start, so that the arrays need not be copied once more
    groups = sorted((sorted(group, key=_index) for group in groups), key=lambda group: group[0].group_index)
    with blamed(bound):
        batch = bound(args=args, groups=groups)
    if not isinstance(batch, TrainBatch):
        raise PluginError(f"plugin '{bound.name}': convert_train_data must return a TrainBatch, got {_kind(batch)}.")
    try:
        batch.check()
    except ValueError as error:
        raise PluginError(
            f"plugin '{bound.name}': convert_train_data made a batch that does not fit: {error}"
        ) from None
    return batch.select(np.lexsort((batch.sample_index, batch.group_index)))


def split(batch: TrainBatch, num_ranks: int, num_steps: int, costs: npt.NDArray[Any] | None = None) -> list[Shard]:
    """One shard a rank. Optimiser steps are consecutive runs of samples; each is spread over the ranks by cost.

    A reward that the samples of a trajectory share counts once in the round: it is NaN for all of them but one.

    Args:
        batch: S samples.
        num_ranks: data-parallel ones.
        num_steps: optimiser steps of the round.
        costs: [S], what a sample's training costs; by default its tokens.
    """
    costs = batch.lengths if costs is None else costs
    shared = batch.per_sample.get("shares_reward", False)
    round_rewards = np.where(shared, np.nan, batch.rewards)
    parts: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for step in np.array_split(np.arange(batch.num_samples), num_steps):
        for rank, positions in enumerate(_balance(step, costs, num_ranks)):
            parts[rank].append(positions)
    shards = []
    for steps in parts:
        ends = np.cumsum([len(positions) for positions in steps]).tolist()
        mine = batch.select([position for positions in steps for position in positions])
        shards.append(Shard(mine, ends, round_rewards, batch.group_index))
    return shards


def _balance(positions: Any, costs: npt.NDArray[Any], num_ranks: int) -> list[list[int]]:
    """Dearest first, each to the rank with the lowest cost so far; every rank's positions in ascending order."""
    loads = [(0.0, rank) for rank in range(num_ranks)]
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for position in sorted(positions.tolist(), key=lambda p: (-float(costs[p]), p)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(position)
        heapq.heappush(loads, (load + float(costs[position]), rank))
    return [sorted(share) for share in shares]


def _index(sample: Sample) -> int:
    return sample.index


def _kind(value: object) -> str:
    return type(value).__name__
