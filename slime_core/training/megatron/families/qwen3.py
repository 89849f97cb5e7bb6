"""Qwen3, dense."""

from __future__ import annotations

from slime_core.training.megatron.families.llama import ATTENTION, EMBEDDINGS, MLP, QK_NORM
from slime_core.training.megatron.rules import Family

family = Family(
    rules=(*EMBEDDINGS, *ATTENTION, *QK_NORM, *MLP),
    config=lambda config: {"qk_layernorm": True},
)
