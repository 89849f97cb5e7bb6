"""What Megatron's layers are made of: portable modules on plain torch, or Transformer-Engine's where there are any."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from slime_core.errors import OptionError
from slime_core.training.megatron.context import Cut
from slime_core.training.megatron.routing import Given, Noted
from slime_core.training.torch_backend.packing import Packed, packed_attention


@dataclass
class PackedSequences(PackedSeqParams):
    """The sequences of one packed row, on their way through every layer to the output."""

    packed: Packed | None = None
    """Their padded layout, for the portable attention."""
    places: torch.Tensor | None = None
    """[R] int64, the tokens whose successors' log-probabilities are wanted."""
    targets: torch.Tensor | None = None
    """[R] int64, those successors."""
    temperature: float = 1.0
    """The policy is softmax(logits / temperature)."""
    cut: Cut | None = None
    """How the row lies over the context-parallel ranks; None where there is one."""
    experts: Noted | Given | None = None
    """Where the row's tokens go under --routing-replay; None where that is left to the routers."""


class RMSNorm(torch.nn.RMSNorm):
    """Megatron's norm, on torch alone; sequence parallelism sums its gradient over the tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computed in float32, as transformers does."""
        return super().forward(x.float()).to(x.dtype) if x.dtype != torch.float32 else super().forward(x)


class PackedAttention(MegatronModule):
    """Causal attention within each sequence of a packed row, by torch's scaled dot product.

    Under context parallelism every rank attends for all tokens and keeps its own: exact, but no faster than one rank.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """[T, H, D], [T, K, D] and [T, K, E] -> [T, H * E], of this rank's tokens."""
        if packed_seq_params is None or packed_seq_params.packed is None:
            raise ValueError("the portable attention takes packed rows only")
        cut = packed_seq_params.cut
        whole = (x if cut is None else cut.whole(x, alike=False) for x in (query, key, value))
        rows = (x.transpose(0, 1)[None] for x in whole)
        out, _ = packed_attention(self, *rows, None, packed=packed_seq_params.packed, scaling=self._scale)
        return out[0].flatten(1) if cut is None else out[0].flatten(1).index_select(0, cut.own)


class NormedRowParallelLinear(RowParallelLinear):
    """A layer's output projection, normalised before it joins the residual stream (GLM-4)."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.post_norm = RMSNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, 1, H] and no bias."""
        output, bias = super().forward(input_)
        return self.post_norm(output), bias


def has_transformer_engine() -> bool:
    """Whether Transformer-Engine can be used: it is installed and there is a GPU."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def block_spec(config: TransformerConfig, post_norms: bool) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, and the final norm.

    Raises:
        OptionError: for FP8 where the layers are not Transformer-Engine's.
    """
    if has_transformer_engine() and not post_norms:  # untested: no machine at hand had Transformer-Engine
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    if config.fp8:
        why = "this family's norms are not among them" if post_norms else "there is none, or no GPU"
        raise OptionError(f"--fp8 {config.fp8} multiplies by Transformer-Engine's layers, and {why}; drop --fp8.")
    first = get_transformer_layer_offset(config)
    experts = _experts_by_layer(config)
    layers = [_layer(config, post_norms, experts[first + n]) for n in range(get_num_layers_to_build(config))]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _experts_by_layer(config: TransformerConfig) -> list[bool]:
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    every = config.moe_layer_freq
    if isinstance(every, int):
        return [layer % every == 0 for layer in range(config.num_layers)]
    return [bool(one) for one in every]


def _layer(config: TransformerConfig, post_norms: bool, has_experts: bool) -> ModuleSpec:
    output = NormedRowParallelLinear if post_norms else RowParallelLinear
    qk_norm = RMSNorm if config.qk_layernorm else None
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=output,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    if has_experts:
        projections = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        experts = ModuleSpec(module=SequentialMLP, submodules=projections)
        mlp = ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts))
    else:
        mlp = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=output))
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
