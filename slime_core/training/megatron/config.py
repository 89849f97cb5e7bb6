"""Megatron's configuration from the options and a model's own; layouts that do not divide the model are refused."""

from __future__ import annotations

import argparse
import json
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.errors import OptionError
from slime_core.training.megatron.families.registry import find_entry

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime_core.training.megatron.rules import Family

VERSION = "0.16.1"
"""Of megatron-core, the one this backend was written against: its CPU shim touches private names."""

DIVIDED = {
    "--tensor-model-parallel-size": (
        ("num_attention_heads", "attention heads"),
        ("intermediate_size", "features of the MLP"),
    ),
    "--expert-tensor-parallel-size": (("moe_intermediate_size", "features of an expert"),),
    "--pipeline-model-parallel-size": (("num_hidden_layers", "layers"),),
    "--expert-model-parallel-size": (("num_experts", "experts"),),
}
"""Flag -> what of a config.json it must divide."""


def check_backend(args: argparse.Namespace) -> None:
    """Refuse what `--train-backend` cannot train, before anything starts, from the models' config.json alone.

    Raises:
        OptionError: naming the flag, the model's number and what to do.
    """
    if args.train_backend != "megatron":
        return
    check_installed()
    for directory in filter(None, (args.model, args.ref_model, args.teacher_model, args.critic_model)):
        config = json.loads((Path(directory) / "config.json").read_text())
        config.setdefault("num_experts", config.get("num_local_experts"))  # transformers 5 calls it so
        find_entry(config.get("model_type", ""))
        for flag, parts in DIVIDED.items():
            size = getattr(args, flag.removeprefix("--").replace("-", "_"))
            for key, what in parts:
                number = config.get(key)
                if number is not None and number % size:
                    raise OptionError(f"{flag} {size} does not divide the {number} {what} of {directory}.")
        kv_heads, ranks = config.get("num_key_value_heads") or 1, args.tensor_model_parallel_size
        if kv_heads % ranks and ranks % kv_heads:
            raise OptionError(
                f"--tensor-model-parallel-size {ranks} neither divides the {kv_heads} key-value heads of {directory} "
                "nor is a multiple of them."
            )
        has_experts = config["num_experts"] is not None
        if args.expert_model_parallel_size > 1 and not has_experts:
            raise OptionError(f"--expert-model-parallel-size is for models with experts; {directory} has none.")
        if args.routing_replay and directory == args.model and not has_experts:
            raise OptionError(f"--routing-replay: {directory} has no experts to choose from.")
        if has_experts and args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
            raise OptionError(
                f"{directory} has experts, which Megatron trains under --tensor-model-parallel-size only with "
                "--sequence-parallel."
            )


def check_installed() -> None:
    """Find megatron-core.

    Raises:
        OptionError: when it is missing or another version.
    """
    try:
        found = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        raise OptionError(
            "--train-backend megatron needs megatron-core, which is not installed: pip install 'slime-core[megatron]'."
        ) from None
    if found != VERSION:
        raise OptionError(
            f"--train-backend megatron needs megatron-core {VERSION}, but {found} is installed: pip install "
            f"'megatron-core=={VERSION}'."
        )


def megatron_config(
    args: argparse.Namespace, hf: Any, family: Family, dtype: torch.dtype, on_cpu: bool
) -> TransformerConfig:
    """Megatron's TransformerConfig of a transformers configuration.

    Raises:
        OptionError: for an attention, an activation or biases that the portable layers do not have.
    """
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    if hf.hidden_act != "silu":
        raise OptionError(f"Megatron models here have the activation silu, not '{hf.hidden_act}'.")
    own = dict(family.config(hf))
    if set(getattr(hf, "layer_types", None) or ()) - {"full_attention"}:
        raise OptionError(
            "Megatron models here attend to all earlier tokens; this one has other layers, such as sliding windows: "
            "use --train-backend torch."
        )
    if getattr(hf, "mlp_bias", False) or (getattr(hf, "attention_bias", False) and not own.get("add_qkv_bias")):
        raise OptionError("this model has biases for which its family has no rule: use --train-backend torch.")
    fields: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        "layernorm_epsilon": hf.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        # parallelism
        "tensor_model_parallel_size": args.tensor_model_parallel_size,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
        "expert_model_parallel_size": args.expert_model_parallel_size,
        "expert_tensor_parallel_size": args.expert_tensor_parallel_size,
        "sequence_parallel": args.sequence_parallel,
        "context_parallel_size": args.context_parallel_size,
        # experts see multiples of what FP8 multiplies, too
        "fp8": args.fp8,
        "fp8_recipe": args.fp8_recipe,
        "moe_router_padding_for_quantization": args.fp8 is not None,
        # packed rows have a length of their own
        "variable_seq_lengths": True,
        "pipeline_dtype": dtype,
        "calculate_per_token_loss": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # initialisation also marks which parameters are cut: without it the gradient norm is wrong
        "perform_initialization": True,
        "use_cpu_initialization": on_cpu,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # fused kernels come from Apex and Transformer-Engine
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }
    if args.recompute_num_layers:
        fields |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": args.recompute_num_layers,
        }
    return TransformerConfig(**fields | own)


def rotary_arguments(hf: Any, family: Family) -> dict[str, Any]:
    """The rotary arguments of Megatron's GPTModel.

    Raises:
        OptionError: for a kind of stretched positions that Megatron computes otherwise than transformers.
    """
    rope = hf.rope_parameters
    own = dict(family.rotary(hf))
    kind = rope.get("rope_type", "default")
    if kind != "default" and "rope_scaling" not in own:
        raise OptionError(f"rotary embeddings of type '{kind}' have no counterpart in the Megatron backend.")
    return {"position_embedding_type": "rope", "rotary_base": rope["rope_theta"]} | own
