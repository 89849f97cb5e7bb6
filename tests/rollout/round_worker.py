"""Runs the rollout side alone, with a checkpoint after every round, until it is done or killed; see test_kills.py.

python round_worker.py RUN_DIR NUM_ROUNDS FLAG...
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import numpy as np

from slime_core import TrainBatch
from slime_core.options import parse
from slime_core.rollout.manager import RolloutManager
from slime_core.schedule import Schedule
from slime_core.tracking.checkpoints import begin_checkpoint, checkpoints, complete_checkpoint, latest_checkpoint

TRAINED = "trained.json"
"""What every round trained so far, group index and prompt tokens of each group; stands in for the trainer's state."""


def groups_of(batch: TrainBatch) -> dict[int, list[int]]:
    """Group index -> the tokens of its prompt."""
    starts = np.cumsum(batch.lengths) - batch.lengths
    ends = starts + batch.lengths - batch.response_lengths
    prompts = [batch.tokens[start:end].tolist() for start, end in zip(starts, ends, strict=True)]
    return dict(zip(batch.group_index.tolist(), prompts, strict=True))


async def main(run_dir: Path, num_rounds: int, flags: list[str]) -> None:
    args = parse(flags).args
    manager = RolloutManager(args, "http://127.0.0.1:1", [], 1)
    first, trained, ahead = 0, [], None
    if checkpoints(run_dir):
        directory, first = latest_checkpoint(run_dir)
        manager.load(directory)
        trained = json.loads((directory / TRAINED).read_text())
    for step in range(first, num_rounds):
        collected = ahead or await manager.rollout(step)
        if Schedule(args).ahead and step + 1 < num_rounds:
            ahead = await manager.rollout(step + 1, version=step)
        trained.append(sorted(groups_of(collected.shards[0].batch).items()))
        unfinished = begin_checkpoint(run_dir, step + 1)
        (unfinished / TRAINED).write_text(json.dumps(trained))
        await manager.save(unfinished, step + 1)
        complete_checkpoint(run_dir, unfinished, 2)
    await manager.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
