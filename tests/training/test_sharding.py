"""FSDP2 on two gloo ranks trains, tells and saves what plain replication does."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

# four steps: two rounds of two; rank 1 has nothing of the last
SHARES = [
    [[[0, 2], [7, 8, 11]], [[5, 1, 3, 4], [6, 9, 10]]],
    [[[5], [6, 7, 8, 9, 10, 11]], [[0, 1, 2, 3, 4], []]],
]
ALONE = [[[[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]], [[[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]]]
PPO = ["--advantage-estimator", "ppo", "--critic", "--critic-lr", "1e-3", "--whiten-advantages"]
KL = ["--kl-loss-coef", "0.1", "--ref-update-interval", "1", "--loss-aggregation", "sequence"]


@pytest.fixture
def train(model_dir, run_ranks, tmp_path):
    """Train a job of twelve samples a round; the metrics of its rounds, and the directory it wrote to."""

    def run(name: str, shares: list, *flags: str, **job: object):
        words = ["--model", str(model_dir), "--lr", "1e-3", "--adam-eps", "1e-4", "--num-steps-per-rollout", "2"]
        job = {"flags": [*words, *flags], "num_samples": 12, "shares": shares, **job}
        ranks = run_ranks(job, tmp_path / name)
        assert all(rank["metrics"] == ranks[0]["metrics"] for rank in ranks), "the ranks differ in metrics"
        assert all(rank["checksums"] == ranks[0]["checksums"] for rank in ranks), "the ranks differ in weights"
        return ranks[0]["metrics"], tmp_path / name

    return run


def assert_trained_alike(left, right, rtol=1e-5, atol=5e-5):
    """Gradient norms within `rtol`, weights within `atol`."""
    for mine, other in zip(left[0], right[0], strict=True):
        names = [name for name in mine if name.startswith("train/")]
        assert {n: other[n] for n in names} == pytest.approx({n: mine[n] for n in names}, rel=1e-4, abs=1e-6)
        assert other["train/grad_norm"] == pytest.approx(mine["train/grad_norm"], rel=rtol)
    weights, others = (load_file(directory / "weights_0.safetensors") for _, directory in (left, right))
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        assert_close(others[name], value, rtol=0, atol=atol)


@pytest.mark.parametrize("chosen", [[], [*PPO], [*KL]], ids=["grpo", "critic", "reference"])
def test_four_steps_of_fsdp2_are_those_of_replication(chosen, train):
    replicated = train("replicated", SHARES, *chosen)
    sharded = train("sharded", SHARES, *chosen, "--data-parallel", "fsdp2")
    assert_trained_alike(replicated, sharded)
    told, others = (json.loads((directory / "told.json").read_text()) for _, directory in (replicated, sharded))
    assert others["probe"] == pytest.approx(told["probe"], abs=1e-4)
