"""Qwen3 with experts."""

from __future__ import annotations

from typing import Any

from slime_core.training.megatron.families.llama import ATTENTION, EMBEDDINGS, HF, LAYER, MLP, QK_NORM
from slime_core.training.megatron.rules import Family, GateUp, Replicated, Rule, Split

EXPERT = f"{HF}.mlp.experts.{{expert}}"

EXPERTS = (
    Rule(f"{LAYER}.mlp.router.weight", (f"{HF}.mlp.gate.weight",), Replicated()),
    Rule(
        f"{LAYER}.mlp.experts.{{expert}}.linear_fc1.weight",
        (f"{EXPERT}.gate_proj.weight", f"{EXPERT}.up_proj.weight"),
        GateUp(),
    ),
    Rule(f"{LAYER}.mlp.experts.{{expert}}.linear_fc2.weight", (f"{EXPERT}.down_proj.weight",), Split(1)),
)


def config(config: Any) -> dict[str, Any]:
    """Experts in every `decoder_sparse_step`-th layer but `mlp_only_layers`."""
    sparse = [
        int(layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0)
        for layer in range(config.num_hidden_layers)
    ]
    return {
        "qk_layernorm": True,
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        # weights that are normalised after the choice are a softmax over the chosen
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_layer_freq": sparse,
    }


family = Family(rules=(*EMBEDDINGS, *ATTENTION, *QK_NORM, *MLP, *EXPERTS), config=config)
