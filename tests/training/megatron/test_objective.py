"""One loss code for both backends: what the torch backend trains with a set of flags, Megatron trains too."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from slime_core.options import parse
from slime_core.training.torch_backend.trainer import TorchTrainer
from training.conftest import make_shard, random_samples
from training.megatron.conftest import NUM_SAMPLES, PP2, ROUNDS, TP2, run_ranks

BOTH = ["--lr", "1e-3", "--adam-eps", "1e-4", "--num-steps-per-rollout", "2", "--temperature", "0.7"]
OBJECTIVES = {
    "grpo_kl": [
        "--kl-loss-coef",
        "0.1",
        "--entropy-coef",
        "0.01",
        "--ref-update-interval",
        "2",
        "--loss-aggregation",
        "sequence",
    ],
    "corrected": ["--kl-coef", "0.1", "--importance-correction", "tis", "--advantage-estimator", "reinforce_plus_plus"],
    "gspo": ["--policy-loss", "gspo", "--use-rollout-logprobs", "--loss-aggregation", "rollout"],
    "distilled": ["--advantage-estimator", "opd", "--teacher-model", "OTHER", "--whiten-advantages"],
}
LAYOUTS = {"grpo_kl": TP2, "entropy": TP2, "corrected": PP2, "gspo": [], "distilled": PP2}


def flags_of(name, models):
    return [*BOTH, *(str(models["llama"]) if word == "OTHER" else word for word in OBJECTIVES[name])]


@pytest.fixture(scope="module")
def trained(case_of, models, tmp_path_factory):
    cases = [case_of(name, "qwen3", *LAYOUTS[name], objective=flags_of(name, models), steps=2) for name in OBJECTIVES]
    return run_ranks(tmp_path_factory.mktemp("objectives") / "job", 2, cases)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_objective_is_that_of_the_torch_backend(name, trained, models):
    args = parse(["--model", str(models["qwen3"]), *flags_of(name, models)]).args
    torch_trainer = TorchTrainer(args, rank=0, world_size=1, master_address="127.0.0.1", master_port=0, device="cpu")
    half = NUM_SAMPLES // 2
    wanted = [
        torch_trainer.train(step, make_shard(random_samples(NUM_SAMPLES, seed=step), step_ends=[half, NUM_SAMPLES]))
        for step in range(ROUNDS)
    ]
    found = trained.found(name)["metrics"]
    for mine, theirs in zip(found, wanted, strict=True):
        names = [key for key in theirs if key.startswith("train/")]
        assert {k: mine[k] for k in names} == pytest.approx({k: theirs[k] for k in names}, rel=1e-3, abs=1e-5)
    weights = load_file(trained.weights(name))
    for key, value in torch_trainer.weights("float32"):
        assert_close(weights[key], value, rtol=0, atol=1e-4)
    torch_trainer.close()
