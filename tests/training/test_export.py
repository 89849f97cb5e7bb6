"""What SGLang is sent has the names, shapes and bits of a published file."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3Config, Qwen3MoeConfig
from transformers.core_model_loading import Chunk, WeightConverter

from slime_core.errors import WeightSyncError
from slime_core.training.torch_backend.export import published_weights

SMALL = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
GROUPED = {**SMALL, "num_key_value_heads": 1, "head_dim": 8}
MODELS = {
    "qwen3_moe": Qwen3MoeConfig(**GROUPED, num_experts=3, num_experts_per_tok=1, moe_intermediate_size=8),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=3),
    "qwen3_tied": Qwen3Config(**GROUPED, tie_word_embeddings=True),
}
AN_EXPERT = {
    "qwen3_moe": "model.layers.1.mlp.experts.2.up_proj.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.2.w3.weight",
    "qwen3_tied": None,
}


@pytest.mark.parametrize("name", MODELS)
def test_sglang_is_sent_what_a_file_has(name, make_trainer, tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MODELS[name]).save_pretrained(tmp_path)
    file = load_file(tmp_path / "model.safetensors")
    assert AN_EXPERT[name] is None or AN_EXPERT[name] in file
    sent = list(make_trainer("--engine", "sglang", model=tmp_path).weights("float32"))
    assert len(sent) == len(file) == len(dict(sent))
    for key, tensor in sent:
        assert tensor.is_contiguous()
        assert torch.equal(tensor, file[key]), key


def test_the_embedded_engine_is_sent_what_transformers_has_in_memory(make_trainer, tmp_path):
    AutoModelForCausalLM.from_config(MODELS["qwen3_moe"]).save_pretrained(tmp_path)
    own = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert dict(make_trainer(model=tmp_path).weights("float32")).keys() == own.keys()


def test_tensors_that_a_file_has_joined_are_refused():
    model = AutoModelForCausalLM.from_config(Qwen3Config(**GROUPED))
    parts = [f"self_attn.{part}_proj" for part in ("q", "k", "v")]
    model._weight_conversions = [WeightConverter(["self_attn.qkv"], parts, operations=[Chunk(dim=0)])]
    with pytest.raises(WeightSyncError, match=r"in one tensor, model\.layers\.0\.self_attn\.qkv"):
        list(published_weights(model, torch.float32))
