"""Operations of a sequence against those that torch counts in a real forward and backward pass."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from slime_core.errors import OptionError
from slime_core.tracking.flops import ModelFlops

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_dense_model_computes_what_torch_counts(name, tmp_path):
    CONFIGS[name].save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager")
    flops = ModelFlops.of(str(tmp_path))
    for length in (8, 40):
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, length, dtype=torch.int64)).logits.sum().backward()
        # eager attention computes the half that the causal mask hides
        hidden_half = 6.0 * flops.attention * length**2
        counted = counter.get_total_flops()
        assert flops.of_sequences(np.array([length]))[0] + hidden_half == pytest.approx(counted, rel=0.01)


def test_of_experts_those_count_that_a_token_meets(tmp_path):
    config = Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)
    config.save_pretrained(tmp_path)
    attention = 32 * 32 * 2 + 32 * 16 * 2
    experts = 2 * 3 * 32 * 16 + 32 * 8
    assert ModelFlops.of(str(tmp_path)).parameters == 3 * (attention + experts) + 32 * 61


def test_layers_of_several_widths_count_by_their_mean(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "intermediate_size": [16, 48, 80]}))
    mixed = ModelFlops.of(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    assert mixed == ModelFlops.of(str(tmp_path))


def test_attention_makes_one_long_sequence_cost_more_than_two_halves(tmp_path):
    CONFIGS["llama"].save_pretrained(tmp_path)
    flops = ModelFlops.of(str(tmp_path))
    long, half = flops.of_sequences(np.array([1000, 500]))
    assert long - 2 * half == pytest.approx(6 * flops.attention * (1000**2 - 2 * 500**2))


def test_a_config_that_does_not_tell_its_sizes_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "vocab_size": 9}))
    with pytest.raises(OptionError, match="does not tell num_hidden_layers, num_attention_heads"):
        ModelFlops.of(str(tmp_path))
