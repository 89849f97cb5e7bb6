"""Llama, and the rules that most families share."""

from __future__ import annotations

from typing import Any

from slime_core.errors import OptionError
from slime_core.training.megatron.rules import Family, GateUp, Qkv, Replicated, Rule, Split, Vocabulary

LAYER, HF = "decoder.layers.{layer}", "model.layers.{layer}"

EMBEDDINGS = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Vocabulary()),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated()),
    Rule("output_layer.weight", ("lm_head.weight",), Vocabulary()),
)

ATTENTION = (
    Rule(f"{LAYER}.input_layernorm.weight", (f"{HF}.input_layernorm.weight",), Replicated()),
    Rule(
        f"{LAYER}.self_attention.linear_qkv.weight",
        tuple(f"{HF}.self_attn.{part}_proj.weight" for part in "qkv"),
        Qkv(),
    ),
    Rule(f"{LAYER}.self_attention.linear_proj.weight", (f"{HF}.self_attn.o_proj.weight",), Split(1)),
    Rule(f"{LAYER}.pre_mlp_layernorm.weight", (f"{HF}.post_attention_layernorm.weight",), Replicated()),
)

QKV_BIAS = (
    Rule(
        f"{LAYER}.self_attention.linear_qkv.bias",
        tuple(f"{HF}.self_attn.{part}_proj.bias" for part in "qkv"),
        Qkv(),
    ),
)

QK_NORM = tuple(
    Rule(f"{LAYER}.self_attention.{part}_layernorm.weight", (f"{HF}.self_attn.{part}_norm.weight",), Replicated())
    for part in "qk"
)

MLP = (
    Rule(f"{LAYER}.mlp.linear_fc1.weight", (f"{HF}.mlp.gate_proj.weight", f"{HF}.mlp.up_proj.weight"), GateUp()),
    Rule(f"{LAYER}.mlp.linear_fc2.weight", (f"{HF}.mlp.down_proj.weight",), Split(1)),
)


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rotary(config: Any) -> dict[str, Any]:
    """Llama 3's stretched positions."""
    rope = config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return {}
    numbers = {key: rope[key] for key in LLAMA3}
    if numbers != LLAMA3:
        raise OptionError(f"Megatron stretches Llama 3's positions by {LLAMA3} only; the model has {numbers}.")
    return {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}


family = Family(rules=(*EMBEDDINGS, *ATTENTION, *MLP), rotary=rotary)
