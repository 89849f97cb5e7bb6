"""Which parameters train: all, those that flags name, or LoRA adapters beside the model's own."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from slime_core.errors import OptionError

ADAPTER = "default"
"""peft's name of the one adapter."""


def choose_trainable(args: argparse.Namespace, model: PreTrainedModel) -> None:
    """Set `requires_grad` of every parameter, after adding adapters under `--lora-rank`.

    Raises:
        OptionError: when a pattern fits no parameter, or nothing is left to train.
    """
    if args.lora_rank is not None:
        _add_lora(args, model)
        return
    names = [name for name, _ in model.named_parameters()]
    only = _matching("--only-train-params", args.only_train_params, names) if args.only_train_params else set(names)
    trained = only - _matching("--freeze-params", args.freeze_params, names)
    if not trained:
        raise OptionError("--only-train-params and --freeze-params leave no parameter to train.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


def _matching(flag: str, patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        mine = {name for name in names if re.search(pattern, name)}
        if not mine:
            raise OptionError(f"{flag} '{pattern}' fits no parameter of --model; they are named like {names[0]}.")
        found |= mine
    return found


def _add_lora(args: argparse.Namespace, model: PreTrainedModel) -> None:
    """Hu et al., "LoRA" (arXiv 2106.09685): W + alpha / rank * B A, of which A and B train."""
    from peft import LoraConfig, inject_adapter_in_model

    targets = args.lora_targets if args.lora_targets else "all-linear"
    alpha = args.lora_rank if args.lora_alpha is None else args.lora_alpha
    config = LoraConfig(r=args.lora_rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0, bias="none")
    try:
        inject_adapter_in_model(config, model, ADAPTER)
    except ValueError as error:
        raise OptionError(f"--lora-targets does not fit --model: {error}") from None
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if model.config.get_text_config().tie_word_embeddings and any(hasattr(end, "base_layer") for end in ends):
        raise OptionError("--lora-targets names embedding or head of --model, which share a tensor; leave them out.")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(model.dtype)


def adapted(model: PreTrainedModel) -> Mapping[str, torch.nn.Module]:
    """Name of the weight in the model without adapters -> the layer that has one."""
    try:
        from peft.tuners.lora import LoraLayer
    except ImportError:
        return {}
    found = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    return {f"{name}.weight": module for name, module in found.items()}
