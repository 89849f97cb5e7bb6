"""The slot cache and the forward over it, for several families of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
)

from slime_core.engines.embedded.engine import Engine
from slime_core.engines.embedded.language_model import LanguageModel, ModelLoadError, load_language_model
from slime_core.engines.embedded.request import SamplingParams
from slime_core.engines.embedded.slot_cache import SlotCache

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL),
    "qwen2": Qwen2Config(**SMALL),
    "gpt2": GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=128, eos_token_id=None),
    "mistral with a window of 8": MistralConfig(**SMALL, sliding_window=8),
    "gemma2, windows on every other layer": Gemma2Config(**SMALL, head_dim=8, sliding_window=8),
    "gemma3, windows on some layers": Gemma3TextConfig(
        **SMALL, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_generate_what_transformers_generates(family: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        FAMILIES[family], attn_implementation="eager" if "gemma2" in family else "sdpa"
    )
    language_model = LanguageModel(model, None, None)
    language_model.self_check()
    engine = Engine(language_model)
    engine.start()
    prompts = [list(range(3, 3 + length)) for length in (1, 5, 20)]
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=20, temperature=0.0))
    engine.stop()
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None)
        assert output.output_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4),
        BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4),
    ],
    ids=["recurrent state", "biases from a 2-D mask"],
)
def test_a_family_that_cannot_work_is_refused(config: Any) -> None:
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelLoadError, match=r"mamba|bloom"):
        LanguageModel(model, None, 64).self_check()


def test_a_directory_that_is_no_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"^.* is not a model directory: it has no config.json$"):
        load_language_model(tmp_path, torch.float32)


def test_a_context_longer_than_the_models_is_refused(model_dir: Path) -> None:
    with pytest.raises(ModelLoadError, match="--context-length 100000 exceeds"):
        load_language_model(model_dir, torch.float32, 100_000)


def test_growing_and_cropping_a_cache_keeps_its_contents() -> None:
    cache = SlotCache()
    cache.reserve(2, 10)
    states = torch.randn(2, 1, 10, 4)
    cache.select(0, 2, torch.arange(10).repeat(2, 1), 10)
    cache.update(states, -states, 0)
    cache.reserve(2, 1000)
    assert cache.tokens >= 1000
    cache.reserve(20, 10)  # many rows: the long past is given up
    assert cache.slots >= 20 and cache.tokens < 1000
    cache.select(0, 2, torch.full((2, 1), 10), 11)
    keys, values = cache.update(torch.ones(2, 1, 1, 4), torch.ones(2, 1, 1, 4), 0)
    assert torch.equal(keys[:, :, :10], states) and torch.equal(values[:, :, :10], -states)
    assert torch.equal(keys[:, :, 10], torch.ones(2, 1, 4))


def test_padding_is_written_where_nobody_reads() -> None:
    cache = SlotCache()
    cache.reserve(1, 64)
    cache.select(0, 1, torch.tensor([[cache.padding_position, 0]]), 64)
    keys, _ = cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    assert keys.shape[2] == 64
    assert keys.sum() == 4


def test_rows_can_be_copied() -> None:
    cache = SlotCache()
    cache.reserve(4, 8)
    states = torch.randn(2, 1, 8, 4)
    cache.select(0, 2, torch.arange(8).repeat(2, 1), 8)
    cache.update(states, states, 0)
    cache.copy_row(1, 0, 8)
    cache.fan_out(torch.tensor([1, 0]), 2, 8)
    keys = cache.keys[0]
    assert keys is not None
    assert all(torch.equal(keys[row, :, :8], states[1]) for row in range(4))
