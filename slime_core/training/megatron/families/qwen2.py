"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from slime_core.training.megatron.families.llama import ATTENTION, EMBEDDINGS, MLP, QKV_BIAS
from slime_core.training.megatron.rules import Family

family = Family(
    rules=(*EMBEDDINGS, *ATTENTION, *QKV_BIAS, *MLP),
    config=lambda config: {"add_qkv_bias": True},
)
