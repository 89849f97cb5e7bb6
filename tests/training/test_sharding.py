"""Real gloo ranks: two are one, FSDP2 is replication, packed is unpacked, resumed is unbroken."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from slime_core.training.ranks import Ranks
from slime_core.training.torch_backend.checkpoint import load, saved_shapes

pytestmark = pytest.mark.timeout(1800)  # several jobs a test, each of two processes that load torch anew

ALONE = Ranks(0, 1, torch.device("cpu"), grouped=False)
FSDP2 = ("--data-parallel", "fsdp2")
# four steps: two rounds of two; rank 1 has nothing of the last
TWO = [
    [[[0, 2], [7, 8, 11]], [[5, 1, 3, 4], [6, 9, 10]]],
    [[[5], [6, 7, 8, 9, 10, 11]], [[0, 1, 2, 3, 4], []]],
]
ONE = [[[[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]]] * 2
ONE_STEP_ON_TWO, ONE_STEP_ON_ONE = [[[[0, 2, 7, 8, 11]], [[5, 1, 3, 4]]]], [[[[0, 1, 2, 3, 4, 5, 7, 8, 11]]]]
EVERYTHING = (
    *("--advantage-estimator", "ppo", "--critic", "--critic-lr", "1e-3", "--whiten-advantages"),
    *("--kl-loss-coef", "0.1", "--ref-update-interval", "1", "--loss-aggregation", "sequence"),
)


@pytest.fixture(scope="module")
def train(model_dir, run_ranks, tmp_path_factory):
    """Train rounds of twelve samples on as many ranks as there are shares; the directory they wrote to."""
    root = tmp_path_factory.mktemp("jobs")

    @cache
    def run(shares: str, *flags: str, first: int = 0, last: int = 2, load: Path | None = None) -> Path:
        words = ["--model", str(model_dir), "--lr", "1e-3", "--adam-eps", "1e-4", "--num-steps-per-rollout", "2"]
        job = {"flags": [*words, *flags], "num_samples": 12, "shares": globals()[shares][first:last], "first": first}
        directory = root / str(len(list(root.iterdir())))
        ranks = run_ranks(job | ({"load": str(load)} if load else {}), directory)
        assert all(rank == ranks[0] for rank in ranks), "the ranks differ in metrics or weights"
        return directory

    return run


def metrics(directory: Path) -> list[dict]:
    rounds = json.loads((directory / "rank_0.json").read_text())["metrics"]
    return [{name: value for name, value in row.items() if name.startswith("train/")} for row in rounds]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "weights_0.safetensors")


def saved(directory: Path, *words: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint whose names have these words."""
    shapes = saved_shapes(directory / "checkpoint")
    tensors = {name: torch.empty(shape) for name, shape in shapes.items() if all(word in name for word in words)}
    load(tensors, directory / "checkpoint", ALONE)
    return tensors


def assert_same_gradients(left: Path, right: Path) -> None:
    """After one unclipped step AdamW's first moment is a tenth of the gradient."""
    mine, others = (saved(directory, "policy/optimizer/", "/exp_avg") for directory in (left, right))
    mine, others = ({n: t for n, t in tensors.items() if n.endswith("exp_avg")} for tensors in (mine, others))
    assert mine.keys() == others.keys() != set()
    for name, gradient in mine.items():
        off = torch.linalg.vector_norm(others[name] - gradient) / torch.linalg.vector_norm(gradient)
        assert off < 1e-5, name


def assert_trained_alike(left: Path, right: Path) -> None:
    for mine, other in zip(metrics(left), metrics(right), strict=True):
        assert other == pytest.approx(mine, rel=1e-4, abs=1e-6)
        assert other["train/grad_norm"] == pytest.approx(mine["train/grad_norm"], rel=1e-5)
    expected, given = weights(left), weights(right)
    assert given.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(given[name], value, rtol=0, atol=5e-5)


def test_gradients_of_two_ranks_are_those_of_one_and_of_fsdp2(train):
    flags = ("--clip-grad", "0", "--num-steps-per-rollout", "1")
    one = train("ONE_STEP_ON_ONE", *flags, last=1)
    assert_same_gradients(one, train("ONE_STEP_ON_TWO", *flags, last=1))
    assert_same_gradients(one, train("ONE_STEP_ON_TWO", *flags, *FSDP2, last=1))


def test_gradients_of_packed_samples_are_those_of_single_ones(train):
    flags = ("--clip-grad", "0", "--num-steps-per-rollout", "1")
    one_by_one = train("ONE_STEP_ON_ONE", *flags, "--max-tokens-per-gpu", "1", last=1)
    assert_same_gradients(one_by_one, train("ONE_STEP_ON_ONE", *flags, last=1))


def test_four_steps_of_two_ranks_are_those_of_one(train):
    assert_trained_alike(train("ONE"), train("TWO"))


@pytest.mark.parametrize(
    "chosen", [(), pytest.param(EVERYTHING, marks=pytest.mark.slow)], ids=["grpo", "critic_and_reference"]
)
def test_four_steps_of_fsdp2_are_those_of_replication(chosen, train):
    replicated, sharded = train("TWO", *chosen), train("TWO", *chosen, *FSDP2)
    assert_trained_alike(replicated, sharded)
    told, others = (json.loads((directory / "told.json").read_text()) for directory in (replicated, sharded))
    assert others["probe"] == pytest.approx(told["probe"], abs=1e-4)


def test_micro_batches_of_one_sample_train_what_packed_ones_do(train):
    # ranks with unequal numbers of samples then have unequal numbers of micro-batches
    assert_trained_alike(train("TWO", *FSDP2), train("TWO", *FSDP2, "--max-tokens-per-gpu", "1"))


@pytest.mark.parametrize(
    "chosen",
    [(), FSDP2, pytest.param((*FSDP2, *EVERYTHING), marks=pytest.mark.slow)],
    ids=["replicated", "fsdp2", "fsdp2_critic_and_reference"],
)
def test_a_run_resumed_on_the_same_ranks_goes_on_bitwise(chosen, train):
    first = train("TWO", *chosen, last=1)
    resumed = train("TWO", *chosen, first=1, load=first / "checkpoint")
    unbroken = train("TWO", *chosen)
    assert metrics(resumed) == metrics(unbroken)[1:]
    assert all(torch.equal(value, weights(resumed)[name]) for name, value in weights(unbroken).items())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("TWO", *FSDP2), ("ONE",)),
        (("ONE",), ("TWO", *FSDP2)),
        pytest.param(("TWO",), ("ONE", *FSDP2), marks=pytest.mark.slow),
    ],
    ids=["fsdp2_to_one", "one_to_fsdp2", "replicated_to_one_fsdp2"],
)
def test_a_run_is_resumed_on_another_number_of_ranks(before, after, train):
    first = train(*before, last=1)
    resumed = train(*after, first=1, load=first / "checkpoint")
    for name, value in weights(train("TWO")).items():
        assert_close(weights(resumed)[name], value, rtol=0, atol=5e-5)


def test_adapters_are_cut_up_too(train):
    flags = ("--lora-rank", "2", "--recompute-activations")
    assert_trained_alike(train("TWO", *flags), train("TWO", *flags, *FSDP2))


def test_bfloat16_computes_beside_float32_weights(train):
    sharded = train("TWO", *FSDP2, "--dtype", "bfloat16")
    assert json.loads((sharded / "told.json").read_text())["dtype"] == "bfloat16"
    kept = saved(sharded, "policy/weights/")
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in kept.values())
    for name, value in weights(train("TWO")).items():
        assert_close(kept[f"policy/weights/{name}"], value, rtol=0, atol=4e-3)


def test_an_export_of_a_sharded_model_is_one_that_transformers_loads(train):
    directory = train("TWO", *FSDP2)
    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    given = weights(directory)
    assert {name: t for name, t in model.state_dict().items() if name in given}.keys() == given.keys()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in given.items())
