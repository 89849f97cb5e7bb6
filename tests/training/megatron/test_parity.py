"""One rank and every layout of several train what transformers and torch's AdamW train, from loss to parameters."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from training.megatron.cases import ALONE, CP2, EP2, OVERLAP, PARITY, PP2, RECOMPUTE, SP, TP2, case
from training.megatron.conftest import run_ranks

MORE_OF_TWO_RANKS = {
    "one_tp2_sp": ("qwen3", [*TP2, *SP]),
    "pp2_untied": ("llama", PP2),
    "cp2_recompute": ("glm4", [*CP2, *RECOMPUTE]),
    "cp2_experts": ("qwen3_moe", CP2),
    "dp2": ("qwen3", []),
    "dp2_overlap_grads": ("qwen3", ["--overlap-grad-reduce"]),
    "tp2_sp_experts": ("qwen3_moe", [*TP2, *SP, "--expert-tensor-parallel-size", "2"]),
    "glm4_pp2": ("glm4", PP2),
    "qwen2_tp2": ("qwen2", TP2),
}
FOUR_RANKS = {
    "tp2_pp2_sp": ("qwen3", [*TP2, *PP2, *SP]),
    "tp2_pp2": ("qwen2", [*TP2, *PP2]),
    "pp2_dp2": ("qwen3", [*PP2, *OVERLAP]),
    "tp2_dp2": ("llama", TP2),
    "tp2_cp2_sp": ("qwen3", [*TP2, *CP2, *SP]),
    "cp2_pp2": ("llama", [*CP2, *PP2]),
    "cp2_dp2": ("qwen2", [*CP2, *OVERLAP]),
    "tp2_sp_cp2_ep2": ("qwen3_moe", [*TP2, *SP, *CP2, *EP2]),
    "tp2_sp_ep2_dp2": ("qwen3_moe", [*TP2, *SP, *EP2]),
    "tp2_sp_ep2_etp2": ("qwen3_moe", [*TP2, *SP, *EP2, "--expert-tensor-parallel-size", "2"]),
    "ep2_pp2": ("qwen3_moe", [*EP2, *PP2]),
    "glm4_tp2_pp2_sp_recompute": ("glm4", [*TP2, *PP2, *SP, *RECOMPUTE]),
}


def check_parity(ranks, name, wanted, size=None):
    """Loss and gradient norm within 1e-5, parameters within 5e-5, the same on every rank."""
    size = size or ranks.size
    found = [ranks.found(name, rank) for rank in range(size)]
    metrics = found[0]["metrics"]
    assert [m["train/loss"] for m in metrics] == pytest.approx(wanted.losses, abs=1e-5)
    assert [m["train/grad_norm"] for m in metrics] == pytest.approx(wanted.grad_norms, abs=1e-5)
    assert found[0]["prompt"] == pytest.approx(wanted.prompt, abs=1e-4)
    for other in found[1:]:
        assert other["prompt"] == found[0]["prompt"]
        for mine, theirs in zip(metrics, other["metrics"], strict=True):
            assert {k: v for k, v in mine.items() if k[:5] == "train"} == {
                k: v for k, v in theirs.items() if k[:5] == "train"
            }
    for rank in {0, size - 1}:
        weights = load_file(ranks.weights(name, rank))
        tied = {"lm_head.weight"} - weights.keys()
        assert weights.keys() == wanted.weights.keys() - tied
        for key, value in weights.items():
            assert_close(value, wanted.weights[key], rtol=0, atol=5e-5, msg=lambda text, key=key: f"{key}: {text}")


@pytest.fixture(scope="module")
def more_of_two_ranks(models, tmp_path_factory):
    cases = [case(models, name, family, *flags) for name, (family, flags) in MORE_OF_TWO_RANKS.items()]
    return run_ranks(tmp_path_factory.mktemp("more") / "job", 2, cases, timeout_s=600)


@pytest.fixture(scope="module")
def four_ranks(models, tmp_path_factory):
    cases = [case(models, name, family, *flags, size=4) for name, (family, flags) in FOUR_RANKS.items()]
    return run_ranks(tmp_path_factory.mktemp("four") / "job", 4, cases, timeout_s=1700)


@pytest.mark.parametrize("family", ALONE)
def test_one_rank(family, two_ranks, expected):
    check_parity(two_ranks, f"alone_{family}", expected(family), size=1)


@pytest.mark.parametrize("name", PARITY)
def test_two_ranks(name, two_ranks, expected):
    check_parity(two_ranks, name, expected(PARITY[name][0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_OF_TWO_RANKS)
def test_more_layouts_of_two_ranks(name, more_of_two_ranks, expected):
    check_parity(more_of_two_ranks, name, expected(MORE_OF_TWO_RANKS[name][0]))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks(name, four_ranks, expected):
    check_parity(four_ranks, name, expected(FOUR_RANKS[name][0]))
