"""Under --routing-replay the updates of a round send every token to the experts of before the first, in any layout."""

from __future__ import annotations

import functools

import pytest

from training.megatron.cases import CP2, EP2, ETP2, PP2, RECOMPUTE, REPLAYED, ROUTED, SP, TP2, replayed
from training.megatron.conftest import by_torch, check_same, run_ranks

FOUR_RANKS = {
    "routing_tp2_pp2_sp": [*TP2, *PP2, *SP, *ETP2, *RECOMPUTE],
    "routing_tp2_cp2_sp": [*TP2, *CP2, *SP, *EP2, *RECOMPUTE],
    "routing_pp2_dp2": PP2,
    "routing_uneven": [*PP2, *RECOMPUTE],
}
"""Case -> layout; all samples of the last are on one half of the ranks."""


@pytest.fixture(scope="module")
def torch_backend(models):
    @functools.cache
    def trained(*flags):
        return by_torch(models["qwen3_moe"], flags, steps=3, rounds=2)

    return trained


@pytest.fixture(scope="module")
def four_ranks(models, tmp_path_factory):
    cases = [
        replayed(models, name, layout, [], size=4, only_first_has_samples=name == "routing_uneven")
        for name, layout in FOUR_RANKS.items()
    ]
    return run_ranks(tmp_path_factory.mktemp("routing") / "job", 4, cases, timeout_s=400)


def test_tokens_keep_their_experts_in_all_steps(two_ranks):
    free, kept = two_ranks.found("routing_free"), two_ranks.found("routing_kept")
    assert sum(free["before"].values()) == sum(free["updates"].values()) > 0
    assert free["before"] != free["updates"], "the case tests nothing"
    assert kept["before"] == free["before"]
    assert kept["updates"] == kept["before"]


@pytest.mark.parametrize("name", REPLAYED)
def test_tokens_keep_their_experts_in_every_layout(name, two_ranks, torch_backend):
    replay, *flags = *ROUTED, *REPLAYED[name][1]
    wanted = torch_backend(replay, *flags)
    (with_replay, _), (without, _) = wanted[0], torch_backend(*flags)[0]
    assert with_replay["train/ppo_kl"] != pytest.approx(without["train/ppo_kl"], rel=0.1), "the case tests nothing"
    check_same(two_ranks, name, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_tokens_keep_their_experts_on_four_ranks(name, four_ranks, torch_backend):
    check_same(four_ranks, name, torch_backend(*ROUTED))
