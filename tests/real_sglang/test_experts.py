"""A mixture of experts on real SGLang, by one rank and cut over two: weights reach every expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from cluster.conftest import prompts, read_rows, start_run  # noqa: F401
from cluster.test_faults import rounds
from engines.conftest import CONTEXT, EOS, PAD, VOCAB_SIZE, write_model
from real_sglang.conftest import ENVIRONMENT, sglang_words
from slime_core.engines.server import EngineServer
from slime_core.errors import WeightSyncError
from slime_core.options import parse
from slime_core.weights.sync import WeightSync
from weights.conftest import Exporter, Tensors, answer_under

TWO_RANKS = ["--sglang-tp-size", "2", "--engine-env", *ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND=0|1"]
"""Without experts' parallelism, for which SGLang's PyTorch code lacks the places of experts elsewhere (index -1)."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1400)]


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> list[Path]:
    """The same architecture with two sets of weights."""
    directories = [write_model(tmp_path_factory.mktemp(f"experts_{seed}"), seed) for seed in range(2)]
    config = Qwen3MoeConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        moe_intermediate_size=32,
        num_experts=12,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    for seed, directory in enumerate(directories):
        torch.manual_seed(seed)
        Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directories


@pytest.fixture(scope="module", params=[[], TWO_RANKS], ids=["one_rank", "two_ranks"])
def flags(request) -> list[str]:
    return request.param


@pytest.fixture(scope="module")
def expert_url(flags, experts, tmp_path_factory) -> Iterator[str]:
    args = parse([*sglang_words(experts[0]), *flags]).args
    server = EngineServer(args, 0, tmp_path_factory.mktemp("logs"), threads=1)
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def make_sync(flags, experts, expert_url, tmp_path) -> Iterator[Callable[[str], WeightSync]]:
    made: list[WeightSync] = []

    def make(transport: str) -> WeightSync:
        words = ("--weights-dir", str(tmp_path), "--weight-transport", transport, "--weights-check-interval", "1")
        made.append(WeightSync(parse([*sglang_words(experts[0], *words), *flags]).args, [expert_url], tmp_path))
        return made[-1]

    yield make
    for sync in made:
        sync.close()


@pytest.mark.parametrize("transport", ["disk", "broadcast", "tensor"])
async def test_weights_reach_all_experts(transport, make_sync, expert_url, experts):
    sync = make_sync(transport)
    first = await answer_under(sync, expert_url, Exporter(experts[1]), 1, 1e-5)
    assert first != await answer_under(sync, expert_url, Exporter(experts[0]), 2, 1e-5)


async def test_weights_of_an_expert_that_got_lost_are_found_out(make_sync, experts, flags):
    """SGLang takes an unknown name silently; by one rank the checksums tell, by two the prompt."""

    def rename(tensors: Tensors) -> Tensors:
        return {name.replace("experts.11.", "experts.12."): tensor for name, tensor in tensors.items()}

    message = "disagree on a prompt" if flags else r"layers\.0\.mlp\.experts\.w13_weight"
    with pytest.raises(WeightSyncError, match=message):
        await make_sync("disk").send(Exporter(experts[1], rename), 3)
    await make_sync("disk").send(Exporter(experts[0]), 4)


def test_a_run_trains_a_mixture_of_experts(start_run, read_rows, experts):  # noqa: F811
    run = start_run("--num-rollout", "3", *sglang_words(experts[0]))
    code, output = run.finish()
    assert code == 0, output
    done = rounds(read_rows())
    assert [row["step"] for row in done] == [0, 1, 2]
    assert all(row["train/logprob_abs_diff"] < 1e-4 for row in done), "every round had the weights of before it"
    run.assert_nothing_left()
