"""GLM-4 (0414 and later, dense): norms after attention and MLP too, and half of each head rotated, pair by pair."""

from __future__ import annotations

from typing import Any

from slime_core.training.megatron.families.llama import ATTENTION, EMBEDDINGS, HF, LAYER, QKV_BIAS
from slime_core.training.megatron.rules import Family, GateUp, Replicated, Rule, Split

MLP = (
    Rule(f"{LAYER}.mlp.linear_fc1.weight", (f"{HF}.mlp.gate_up_proj.weight",), GateUp(fused=True)),
    Rule(f"{LAYER}.mlp.linear_fc2.weight", (f"{HF}.mlp.down_proj.weight",), Split(1)),
)

POST_NORMS = (
    Rule(
        f"{LAYER}.self_attention.linear_proj.post_norm.weight",
        (f"{HF}.post_self_attn_layernorm.weight",),
        Replicated(),
    ),
    Rule(f"{LAYER}.mlp.linear_fc2.post_norm.weight", (f"{HF}.post_mlp_layernorm.weight",), Replicated()),
)


def rotary(config: Any) -> dict[str, Any]:
    """A part of each head."""
    return {"rotary_percent": config.rope_parameters["partial_rotary_factor"]}


family = Family(
    rules=(*EMBEDDINGS, *ATTENTION, *QKV_BIAS, *MLP, *POST_NORMS),
    config=lambda config: {"add_qkv_bias": bool(config.attention_bias), "rotary_interleaved": True},
    rotary=rotary,
    post_norms=True,
)
