"""One loss code for both backends: what the torch backend trains with a set of flags, Megatron trains too."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from slime_core.options import parse
from slime_core.training.torch_backend.trainer import TorchTrainer
from training.conftest import make_shard, random_samples
from training.megatron.cases import NUM_SAMPLES, OBJECTIVES, ROUNDS, objective_flags


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_objective_is_that_of_the_torch_backend(name, two_ranks, models):
    args = parse(["--model", str(models["qwen3"]), *objective_flags(models, name)]).args
    torch_trainer = TorchTrainer(args, rank=0, world_size=1, master_address="127.0.0.1", master_port=0, device="cpu")
    half = NUM_SAMPLES // 2
    wanted = [
        torch_trainer.train(step, make_shard(random_samples(NUM_SAMPLES, seed=step), step_ends=[half, NUM_SAMPLES]))
        for step in range(ROUNDS)
    ]
    found = two_ranks.found(name)["metrics"]
    for mine, theirs in zip(found, wanted, strict=True):
        names = [key for key in theirs if key.startswith("train/")]
        assert {k: mine[k] for k in names} == pytest.approx({k: theirs[k] for k in names}, rel=1e-3, abs=1e-5)
    weights = load_file(two_ranks.weights(name))
    for key, value in torch_trainer.weights("float32"):
        assert_close(weights[key], value, rtol=0, atol=1e-4)
    torch_trainer.close()
