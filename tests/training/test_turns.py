"""Rewards by turn and shared rewards, down to the loss of a training step."""

import statistics
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slime_core import Sample
from slime_core.rollout.convert import split
from slime_core.types import TrainBatch
from training.test_trainer import plain_logprobs

LOSS = """
from slime_core import hookimpl

@hookimpl
def policy_loss(batch, logprobs):
    return -batch.advantages * logprobs, {"turn_reward": batch["turn_reward"].nan_to_num()}
"""

# group, rollout, reward, whether it is shared, rewards by turn (two trained tokens a turn, one of the environment)
ROUND = [
    (0, 0, 1.0, True, []),
    (0, 0, 1.0, False, [0.5, 1.0]),
    (0, 1, 0.0, False, [0.0]),
    (1, 2, 0.0, False, [1.0, 0.0]),
    (1, 3, 3.0, False, [0.0, 0.5]),
]


def make_samples() -> list[Sample]:
    rng, made = np.random.default_rng(0), []
    for index, (group, rollout, reward, shared, by_turn) in enumerate(ROUND):
        sample = Sample(index=index, group_index=group, rollout_index=rollout, reward=reward, shares_reward=shared)
        sample.tokens = rng.integers(0, 250, 3).astype(np.int32)
        sample.turn_rewards = by_turn
        for _ in by_turn or [0.0]:
            sample.append(rng.integers(0, 250, 2), logprobs=[-1.0, -1.0], weight_version=0)
            sample.turn_ends.append(sample.response_length)
            sample.append(rng.integers(0, 250, 1), trainable=False)
        made.append(sample)
    return made


def advantage(index: int, turn: int) -> float:
    """Of a token of a turn, by hand: each rollout counts once, each turn is compared with the same one of its group."""
    group, _, reward, _, by_turn = ROUND[index]
    total = normal(reward, [r for g, _, r, shared, _ in ROUND if g == group and not shared])
    for number, mine in enumerate(by_turn):
        if number >= turn:
            total += normal(mine, [turns[number] for g, _, _, _, turns in ROUND if g == group and len(turns) > number])
    return total


def normal(reward: float, peers: list[float]) -> float:
    return 0.0 if len(peers) == 1 else (reward - statistics.fmean(peers)) / (statistics.stdev(peers) + 1e-6)


def test_a_step_on_turns_against_a_loop(make_trainer, model_dir, tmp_path):
    plugin = tmp_path / "plain.py"
    plugin.write_text(LOSS)
    samples = make_samples()
    (shard,) = split(TrainBatch.from_samples(samples), 1, 1)
    flags = ("--advantage-estimator", "turn_grpo", "--policy-loss", str(plugin), "--max-tokens-per-gpu", "12")
    metrics = make_trainer(*flags).train(0, shard)

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    losses, rewards = [], []
    for index, sample in enumerate(samples):
        logprobs = plain_logprobs(model, sample)
        starts = [0, *(end + 1 for end in sample.turn_ends)]
        for turn, (start, _) in enumerate(pairwise(starts)):
            by_turn = ROUND[index][4]
            losses += [-advantage(index, turn) * logprobs[place].item() for place in (start, start + 1)]
            rewards += [0.0, by_turn[turn] if by_turn else 0.0]
    assert metrics["train/loss"] == pytest.approx(statistics.fmean(losses), rel=1e-4)
    assert metrics["train/turn_reward"] == pytest.approx(statistics.fmean(rewards))
