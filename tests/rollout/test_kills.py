"""The rollout side is killed at any point and resumed: no group is lost, and none is trained twice."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from slime_core.rollout.sample_file import read_groups
from slime_core.tracking.checkpoints import latest_checkpoint

WORKER = Path(__file__).with_name("round_worker.py")
NUM_ROUNDS, BATCH, NUM_PROMPTS = 60, 3, 17

AHEAD = ["--max-staleness", "1"]
"""Every save finds a round that is collected and not yet trained."""

SURPLUS = ["--over-sampling-batch-size", "5"]

# Some answers take longer than others, so that groups finish out of order and a round leaves some behind.
UNEVEN = """
import asyncio, random
@hookimpl
async def generate(sample):
    await asyncio.sleep(random.random() * 0.04)
    sample.append([sample.group_index], logprobs=[-1.0], weight_version=0)
    sample.reward, sample.status = 1.0, Status.COMPLETED
    return [sample]
"""


def start(run_dir: Path, flags: list[str]) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, str(WORKER), str(run_dir), str(NUM_ROUNDS), *flags])


def state(run_dir: Path) -> tuple[list[int], list[int], dict]:
    """Groups trained and waiting, and the counters, of the newest checkpoint."""
    directory, _ = latest_checkpoint(run_dir)
    trained = [index for index, _ in trained_groups(run_dir)]
    waiting = [group[0].group_index for group in read_groups(directory / "waiting.parquet")]
    return trained, waiting, json.loads((directory / "rollout.json").read_text())


def trained_groups(run_dir: Path) -> list[list]:
    """Index and prompt tokens of every group trained."""
    directory, _ = latest_checkpoint(run_dir)
    return [group for one in json.loads((directory / "trained.json").read_text()) for group in one]


def run_killed(run_dir: Path, flags: list[str], num_kills: int, seed: int) -> None:
    random = Random(seed)
    for _ in range(num_kills):
        before = latest_checkpoint(run_dir)[1] if (run_dir / "checkpoints" / "latest").exists() else 0
        process = start(run_dir, flags)
        # it dies some time after it has got further than the last one, in the middle of a save or of a round
        while process.poll() is None and not list((run_dir / "checkpoints").glob(f"step_{before + 1:06d}")):
            time.sleep(0.005)
        time.sleep(random.random() * 0.15)
        process.kill()
        process.wait()
        trained, waiting, counters = state(run_dir)
        assert len(trained) == len(set(trained)), "no group is trained twice"
        assert sorted([*trained, *waiting]) == list(range(counters["source"]["num_drawn"])), "none is lost"
        assert counters["num_trained"] == len(trained) and counters["num_dropped"] == 0
    assert start(run_dir, flags).wait(600) == 0


@pytest.mark.parametrize("num_kills", [2, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("words", [[], AHEAD, SURPLUS, [*SURPLUS, "--partial-rollout", "--max-staleness", "100"]])
def test_a_killed_and_resumed_rollout_trains_what_an_unbroken_one_does(
    make_args, write_rows, plugin_file, model_dir, tmp_path, words, num_kills
):
    prompts = write_rows([{"prompt": f"p{i}"} for i in range(NUM_PROMPTS)])
    flags = ["--model", str(model_dir), "--prompt-data", str(prompts), "--generate", plugin_file("uneven", UNEVEN)]
    flags += ["--rollout-batch-size", str(BATCH), "--n-samples-per-prompt", "2", *words]
    run_killed(tmp_path / "killed", flags, num_kills, seed=num_kills)
    trained, waiting, counters = state(tmp_path / "killed")
    assert len(trained) == NUM_ROUNDS * BATCH == counters["num_trained"]
    assert sorted([*trained, *waiting]) == list(range(counters["source"]["num_drawn"]))
    if SURPLUS[0] not in words:
        assert start(tmp_path / "unbroken", flags).wait(600) == 0
        assert sorted(trained_groups(tmp_path / "killed")) == sorted(trained_groups(tmp_path / "unbroken"))
