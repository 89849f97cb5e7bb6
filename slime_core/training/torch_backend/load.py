"""Load a model to train or to ask: its weights, what of it trains, how it is cut up, and how it may be called."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from slime_core.errors import OptionError
from slime_core.training.logit_scaling import LogitScaling
from slime_core.training.ranks import Ranks
from slime_core.training.torch_backend.model import (
    Policy,
    hidden_of,
    logits_of,
    packed_inputs,
    padded_inputs,
    padded_places,
)
from slime_core.training.torch_backend.packing import ATTENTION, register_attention
from slime_core.training.torch_backend.pretrained import from_pretrained, takes_images
from slime_core.training.torch_backend.sharding import Entry, layers_of, run, shard
from slime_core.training.torch_backend.trainable import choose_trainable

logger = logging.getLogger(__name__)

PROBE_LENGTHS = np.array([7, 6, 4])
"""Sequences on which a model shows that it can be packed."""


def load_policy(args: argparse.Namespace, ranks: Ranks) -> Policy:
    """Load `--model` and what trains beside it; every rank must call it."""
    model = load_model(args, ranks.device, args.model)
    choose_trainable(args, model)
    _shorten_frozen(model, compute_dtype(args, ranks.device))
    return _policy(args, ranks, model)


def load_frozen(args: argparse.Namespace, ranks: Ranks, directory: str) -> Policy:
    """Load a model that does not train; every rank must call it."""
    model = load_model(args, ranks.device, directory)
    model.requires_grad_(False)
    _shorten_frozen(model, compute_dtype(args, ranks.device))
    return _policy(args, ranks, model)


def load_model(args: argparse.Namespace, device: torch.device, directory: str) -> PreTrainedModel:
    """A model on the CPU, all of which trains, in the dtype in which it is kept then."""
    register_attention()
    transformers_logging.disable_progress_bar()
    # FSDP2 computes with copies in the dtype of the computation
    dtype = torch.float32 if args.data_parallel == "fsdp2" else compute_dtype(args, device)
    model = from_pretrained(directory, dtype)
    if takes_images(model.config) and args.data_parallel == "fsdp2":
        raise OptionError(
            f"{directory} takes images, which every rank would need to have at once; use --data-parallel replicated."
        )
    # dropout would give one token several probabilities, so the model stays in evaluation mode
    model.eval()
    if args.recompute_activations:
        _recompute_activations(model)
    return model


def _shorten_frozen(model: PreTrainedModel, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _policy(args: argparse.Namespace, ranks: Ranks, model: PreTrainedModel) -> Policy:
    entry = Entry(model)
    dtype = compute_dtype(args, ranks.device)
    place(args, entry, ranks, dtype)
    packs, scaling = probe(entry, model, ranks.device)
    temperature = float(args.temperature) if args.temperature > 0 else 1.0
    return Policy(entry, ranks.device, dtype, temperature, packs, scaling)


def _recompute_activations(model: PreTrainedModel) -> None:
    layers = layers_of(model)
    try:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise OptionError(f"--recompute-activations does not work for {type(model).__name__}: {error}") from None
    if not layers:
        raise OptionError(f"--recompute-activations finds no layers in {type(model).__name__}.")
    for layer in layers:
        # transformers asks for it before it recomputes; within, where a layer may drop out by itself, it does not hold
        layer.training = True
        layer._gradient_checkpointing_func = partial(_recomputed, layer, layer._gradient_checkpointing_func)


def _recomputed(layer: nn.Module, checkpoint: Callable[..., Any], forward: Callable[..., Any], *args: Any) -> Any:
    def in_evaluation_mode(*args: Any) -> Any:
        layer.training = False
        try:
            return forward(*args)
        finally:
            layer.training = True

    return checkpoint(in_evaluation_mode, *args)


def place(args: argparse.Namespace, root: nn.Module, ranks: Ranks, dtype: torch.dtype) -> None:
    """Bring the parameters of a module to the rank's device: all of them, or its part of each.

    Args:
        args: the options.
        root: the module.
        ranks: that it is cut up over under `--data-parallel fsdp2`.
        dtype: in which it computes then.
    """
    if args.data_parallel == "fsdp2":
        # on a CPU they are in host memory anyway
        offload = args.cpu_offload and ranks.device.type != "cpu"
        shard(root, layers_of(root), ranks, dtype=dtype, offload=offload)
    else:
        root.to(ranks.device)


def compute_dtype(args: argparse.Namespace, device: torch.device) -> torch.dtype:
    """What `--dtype` says, or suits the device."""
    dtype: torch.dtype = getattr(torch, args.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    return dtype


def probe(root: nn.Module, model: PreTrainedModel, device: torch.device) -> tuple[bool, LogitScaling | None]:
    """Whether sequences of the model can be packed, and what it does to its head's logits; None if that is unknown.

    Args:
        root: as whose forward the model computes.
        model: gets packed attention if it can be packed.
        device: where it computes.
    """
    vocab = int(model.config.get_text_config().vocab_size)
    tokens = torch.arange(1, int(PROBE_LENGTHS.sum()) + 1, device=device) * 7919 % vocab
    with torch.no_grad():
        packs = _can_pack(root, model, tokens)
        return packs, run(root, _scaling, model, tokens, packs)


def _can_pack(root: nn.Module, model: PreTrainedModel, tokens: torch.Tensor) -> bool:
    """Give the model packed attention if it then computes what it does on padded rows; otherwise leave it as it was."""
    before = model.config._attn_implementation
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if takes_images(model.config):
        return _refuse(model, before, "images need rows of their own")
    if not kinds <= {"full_attention", "sliding_attention"} or not model._supports_attention_backend:
        return _refuse(model, before, "its layers do not all go through the attention interface")
    expected = run(root, hidden_of, model, padded_inputs(tokens, PROBE_LENGTHS)).flatten(0, 1)
    expected = expected[padded_places(PROBE_LENGTHS, tokens.device)]
    try:
        model.set_attn_implementation(ATTENTION)
        got = run(root, hidden_of, model, packed_inputs(tokens, PROBE_LENGTHS))[0]
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return _refuse(model, before, f"{type(error).__name__}: {error}")
    tolerance = 1e-4 if got.dtype == torch.float32 else 3e-2
    off = ((got - expected).abs().max() / expected.abs().max()).item()
    return off <= tolerance or _refuse(model, before, f"packed states are off by {off:.1e} of the largest")


def _refuse(model: PreTrainedModel, attention: str, why: str) -> bool:
    if model.config._attn_implementation != attention:
        model.set_attn_implementation(attention)
    logger.warning("sequences of %s are padded instead of packed: %s", type(model).__name__, why)
    return False


def _scaling(model: PreTrainedModel, tokens: torch.Tensor, packs: bool) -> LogitScaling | None:
    """What makes the model's logits of those of its output layer, applied to the last hidden state; None: unknown."""
    head: Any = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return None
    inputs = packed_inputs(tokens, PROBE_LENGTHS) if packs else padded_inputs(tokens, PROBE_LENGTHS)
    scaling = LogitScaling.of(model.config.get_text_config())
    try:
        hidden = hidden_of(model, inputs)
        # bit for bit: a bound on the logits may change small ones by less than any tolerance
        same = torch.equal(scaling(head(hidden)), logits_of(model, inputs))
    except (AttributeError, RuntimeError, TypeError, ValueError):
        same = False
    if not same:
        logger.warning(
            "%s does more than scale its output layer: all logits of a micro-batch exist at once", type(model).__name__
        )
    return scaling if same else None
