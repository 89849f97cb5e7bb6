"""Two gloo ranks, as processes of their own, train what one rank trains, however the samples are shared out."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from slime_core.training.torch_backend.checkpoint import saved_shapes


def flags_of(model_dir: Path, *flags: str) -> list[str]:
    return ["--model", str(model_dir), "--lr", "1e-3", "--adam-eps", "1e-4", "--num-steps-per-rollout", "2", *flags]


WHITENED = ["--advantage-estimator", "reinforce_plus_plus", "--kl-coef", "0.1", "--loss-aggregation", "constant"]
PPO = ["--advantage-estimator", "ppo", "--critic", "--critic-lr", "1e-3", "--whiten-advantages"]

NORMALIZED = ["--importance-correction", "tis", "--importance-normalize", "--loss-aggregation", "sequence"]


@pytest.mark.parametrize("chosen", [[], ["--loss-aggregation", "rollout"], NORMALIZED, WHITENED, PPO])
def test_two_ranks_train_as_one(chosen, model_dir, make_trainer, samples, shard_of, run_ranks, tmp_path):
    # two rounds of two steps; rank 1 has nothing of the second step of the second round
    split = [
        [[[0, 2], [7, 8, 11]], [[5, 1, 3, 4], [6, 9, 10]]],
        [[[5], [6, 7, 8, 9, 10, 11]], [[0, 1, 2, 3, 4], []]],
    ]
    flags = flags_of(model_dir, *chosen)
    one = make_trainer(*flags[2:])
    alone = []
    for step in range(2):
        made = samples(12, seed=step)
        for sample in made:
            sample.rollout_index //= 3  # fan-outs of three, which the ranks share
        alone.append(one.train(step, shard_of(made, step_ends=[6, 12])))
    two = run_ranks({"flags": flags, "num_samples": 12, "fan_out": 3, "shares": split}, tmp_path / "two")
    assert two[0] == two[1], "the ranks differ in metrics or weights"
    for left, right in zip(alone, two[0]["metrics"], strict=True):
        kept = [name for name in left if name.startswith("train/")]
        assert {n: right[n] for n in kept} == pytest.approx({n: left[n] for n in kept}, rel=1e-3, abs=1e-5)
    for name, value in one.weights("float32"):
        assert_close(load_file(tmp_path / "two" / "weights_1.safetensors")[name], value, rtol=0, atol=1e-5)
    written = saved_shapes(tmp_path / "two" / "checkpoint")
    assert {"rng/0", "rng/1"} <= written.keys()
    assert any(name.startswith("critic/") for name in written) == (chosen is PPO)


def test_a_rank_without_samples_takes_part(model_dir, run_ranks, tmp_path):
    shares = [[[[0, 1], [2, 3]], [[], []]]]
    results = run_ranks({"flags": flags_of(model_dir), "num_samples": 4, "shares": shares}, tmp_path / "two")
    assert results[0] == results[1]
    assert results[0]["metrics"][0]["train/grad_norm"] > 0
    assert results[0]["metrics"][0]["train/skipped_steps"] == 0
