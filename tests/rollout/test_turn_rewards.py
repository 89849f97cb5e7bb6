"""Rewards of turns, and rewards that several samples share, from the reward stage to the advantages."""

import math
import statistics
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch

from slime_core.defaults import grpo, turn_grpo
from slime_core.errors import RolloutError
from slime_core.rollout.convert import split
from slime_core.training.batch import TensorBatch
from slime_core.types import Sample, TrainBatch

TURNS = """
async def rounds(sample):
    for turn in range(1 + sample.index % 3):
        sample.append([65, 66], text="AB", logprobs=[-1.0, -1.0], weight_version=0)
        sample.turn_ends.append(sample.response_length)
        sample.append([91], text="[", trainable=False)
    sample.status = Status.COMPLETED

@hookimpl
async def generate(sample):
    await rounds(sample)
    return [sample]
"""
"""A generator of 1, 2 or 3 turns."""

GRADED_BY_TURN = """
@hookimpl
def reward(sample):
    by_turn = [sample.index + 10.0 * k for k in range(len(sample.turn_ends))]
    return {"reward": float(sample.index), "turn_rewards": by_turn}
"""

IN_TWO = """
@hookimpl
async def generate(sample):
    first = sample.clone()
    for part in (first, sample):
        part.append([65], text="A", logprobs=[-1.0], weight_version=0)
        part.status = Status.COMPLETED
    first.shares_reward = True
    return [first, sample]
"""
"""A generator that makes a trajectory of two samples, as one does that shortens the context between them."""


@pytest.fixture
def rollout(make_args, open_manager, write_rows, plugin_file):
    """`await rollout(generator, reward, *flags)` -> shards and metrics of a round of 2 groups of 4."""

    async def run(generator, reward, *flags, num_ranks=1):
        words = ["--generate", plugin_file("makes", generator), "--reward", f"{plugin_file('grades', reward)}=2"]
        rows = write_rows([{"prompt": "a"}, {"prompt": "b"}])
        args = make_args("--prompt-data", rows, "--n-samples-per-prompt", 4, *words, *flags)
        async with open_manager(args, num_ranks=num_ranks) as manager:
            result = await manager.rollout(0)
        return result.shards, result.metrics

    return run


async def test_rewards_by_turn_stand_on_the_last_token_of_each_turn(rollout):
    (shard,), _ = await rollout(TURNS, GRADED_BY_TURN)
    batch = shard.batch
    rewards = np.split(batch.per_token["turn_reward"], np.cumsum(batch.response_lengths)[:-1])
    for index, row in zip(batch.sample_index.tolist(), rewards, strict=True):
        expected = [x for k in range(1 + index % 3) for x in (math.nan, 2 * (index + 10.0 * k), math.nan)]
        np.testing.assert_array_equal(row, np.array(expected, np.float32))
    assert batch.rewards.tolist() == [2.0 * index for index in range(8)]


@pytest.mark.parametrize(
    "given", ["[1.0]", "7.0", "[math.nan] * len(sample.turn_ends)", "['a'] * len(sample.turn_ends)"]
)
async def test_rewards_that_do_not_fit_the_turns_fail_the_sample(rollout, given):
    grader = f"import math\n@hookimpl\ndef reward(sample): return {{'reward': 1.0, 'turn_rewards': {given}}}"
    with pytest.raises(RolloutError, match="turn_rewards"):
        await rollout(TURNS, grader, "--max-reward-failure-rate", "0")


async def test_a_shared_reward_is_given_once_and_counts_once(rollout):
    grader = "@hookimpl\ndef reward(sample): return float(sample.index % 4)"
    (shard,), metrics = await rollout(IN_TWO, grader)
    batch = shard.batch
    by_rollout: dict[int, list[float]] = {}
    for rollout_index, reward in zip(batch.rollout_index.tolist(), batch.rewards.tolist(), strict=True):
        by_rollout.setdefault(rollout_index, []).append(reward)
    assert all(len(rewards) == 2 and len(set(rewards)) == 1 for rewards in by_rollout.values())
    assert np.isnan(shard.round_rewards).tolist() == batch.per_sample["shares_reward"].tolist()
    assert metrics["reward/mean"] == pytest.approx(statistics.fmean(rewards[0] for rewards in by_rollout.values()))


async def test_what_shares_the_reward_of_a_failed_sample_fails_with_it(rollout):
    broken = "@hookimpl\ndef reward(sample): return 1.0 / (sample.rollout_index != 1)"
    (shard,), _ = await rollout(IN_TWO, broken, "--max-reward-failure-rate", "1")
    assert sorted(shard.batch.rollout_index.tolist()) == [index for index in range(8) if index != 1 for _ in range(2)]
    assert not np.isnan(shard.batch.rewards).any()


async def test_a_split_trajectory_counts_once_in_its_group_on_every_rank(rollout):
    grader = "@hookimpl\ndef reward(sample): return float(sample.index ** 2)"
    shards, _ = await rollout(TURNS, grader, "--convert-train-data", "turns", num_ranks=2)
    for shard in shards:
        batch = TensorBatch.of(shard.batch, torch.device("cpu"))
        assert batch.loss_mask.all() and len(batch.loss_mask) == 2 * batch.num_samples
        advantages, _ = grpo.estimate_advantages(
            Namespace(grpo_std_normalization=True),
            batch,
            torch.from_numpy(shard.round_rewards),
            torch.from_numpy(shard.round_group_index),
        )
        for index, advantage in zip(batch.sample_index.tolist(), advantages[::2].tolist(), strict=True):
            peers = [2.0 * (4 * (index // 4) + k) ** 2 for k in range(4)]
            expected = (2.0 * index**2 - statistics.fmean(peers)) / statistics.stdev(peers)
            assert advantage == pytest.approx(expected, rel=1e-4)


# --- the estimator ----------------------------------------------------------------------------------------------------
ROUND = [
    (3, 1.0, [0.0, 1.0]),
    (3, 0.0, [1.0]),
    (7, 1.0, [0.5, 0.5, 1.0]),
    (3, None, [0.25, 0.5]),
    (7, 2.0, []),
    (7, 0.0, [2.0, 0.0]),
]
"""Group, outcome, rewards of the turns; these are of 1, 2, 3, ... tokens, each followed by one of the environment."""


def make_samples() -> list[Sample]:
    made = []
    for index, (group, outcome, by_turn) in enumerate(ROUND):
        sample = Sample(index=index, group_index=group, reward=outcome, turn_rewards=by_turn)
        for number in range(len(by_turn) or 2):
            sample.append([1] * (number + 1), logprobs=[-1.0] * (number + 1), weight_version=0)
            sample.turn_ends.append(sample.response_length)
            sample.append([2], trainable=False)
        made.append(sample)
    return made


def naive(index: int, coef: float) -> list[float]:
    """The advantages of the trained tokens of a sample."""
    group, outcome, by_turn = ROUND[index]
    whole = normal(outcome, [o for g, o, _ in ROUND if g == group and o is not None])
    turns = [normal(r, [t[k] for g, _, t in ROUND if g == group and len(t) > k]) for k, r in enumerate(by_turn)]
    turns = turns or [0.0, 0.0]
    return [whole + coef * sum(turns[k:]) for k in range(len(turns)) for _ in range(k + 1)]


def normal(reward: float | None, peers: list[float]) -> float:
    if reward is None or len(peers) == 1:
        return 0.0
    return (reward - statistics.fmean(peers)) / (statistics.stdev(peers) + 1e-6)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_turn_grpo_against_a_loop(num_ranks):
    """Ranks are threads here, so that their sums can meet."""
    whole = TrainBatch.from_samples(make_samples())
    shards = split(whole, num_ranks, 1)
    parts: list[torch.Tensor] = [torch.zeros(0)] * num_ranks
    meet = Barrier(num_ranks)

    def run(rank: int) -> dict[int, list[float]]:
        def sum_over_ranks(part: torch.Tensor) -> torch.Tensor:
            parts[rank] = part
            meet.wait()
            total = torch.stack(parts).sum(0)
            meet.wait()
            return total

        shard = shards[rank]
        batch = TensorBatch.of(shard.batch, torch.device("cpu"))
        batch.sum_over_ranks = sum_over_ranks
        advantages, _ = turn_grpo.estimate_advantages(
            Namespace(turn_grpo_coef=0.5),
            batch,
            torch.from_numpy(shard.round_rewards),
            torch.from_numpy(shard.round_group_index),
        )
        lengths = shard.batch.response_lengths.tolist()
        rows = zip(shard.batch.sample_index, advantages.split(lengths), batch.loss_mask.split(lengths), strict=True)
        return {int(index): row[mask].tolist() for index, row, mask in rows}

    with ThreadPoolExecutor(num_ranks) as pool:
        found = {index: row for result in pool.map(run, range(num_ranks)) for index, row in result.items()}
    assert sorted(found) == list(range(len(ROUND)))
    for index, row in found.items():
        assert row == pytest.approx(naive(index, 0.5), rel=1e-4, abs=1e-5), index


def test_turn_grpo_without_rewards_by_turn_is_grpo():
    samples = make_samples()
    for sample in samples:
        sample.turn_rewards = []
    batch = TensorBatch.of(TrainBatch.from_samples(samples), torch.device("cpu"))
    given = (batch, batch.rewards, batch.group_index)
    ours, _ = turn_grpo.estimate_advantages(Namespace(turn_grpo_coef=1.0), *given)
    theirs, _ = grpo.estimate_advantages(Namespace(grpo_std_normalization=True), *given)
    assert torch.equal(ours, theirs)
