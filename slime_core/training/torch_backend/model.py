"""The policy: a transformers causal LM that gives log-probabilities of response tokens."""

from __future__ import annotations

import argparse
import inspect
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from slime_core.errors import SlimeError
from slime_core.training.batch import TensorBatch
from slime_core.training.logprobs import head_logprobs, token_logprobs
from slime_core.training.places import predicting, unpredictable_tokens
from slime_core.training.torch_backend.image_inputs import has_images, image_inputs
from slime_core.training.torch_backend.packing import ATTENTION, pack, register_attention
from slime_core.training.torch_backend.pretrained import from_pretrained, takes_images
from slime_core.types import IntArray

logger = logging.getLogger(__name__)

PROBE_LENGTHS = np.array([7, 6, 4])
"""Sequences on which a model shows that it can be packed."""

Inputs = dict[str, Any]


@dataclass
class Policy:
    """A model on its device, and how it may be called."""

    model: PreTrainedModel
    device: torch.device
    temperature: float
    """The policy is softmax(logits / temperature), as it was when it sampled."""
    packs: bool
    """Sequences go in one packed row; otherwise in right-padded rows with a mask."""
    splits_head: bool
    """The logits are nothing but the output layer of the last hidden state, so that prompts need none."""

    def logprobs(self, batch: TensorBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of each response token and the entropy where it was chosen: two float32 [R], in nats.

        A response that starts its sequence has nothing to predict its first token from; that one gets 0.

        Raises:
            SlimeError: when such a token is trained.
        """
        lengths, responses = batch.host.lengths, batch.host.response_lengths
        at, first = predicting(lengths, responses)
        response = torch.from_numpy(at + 1).to(self.device)
        unpredictable = unpredictable_tokens(batch, first)
        # an unpredictable first token borrows its own place, and is set to 0 below
        place = torch.from_numpy(np.where(first, at + 1, at)).to(self.device)
        logprobs, entropy = self._at(self._inputs(batch), lengths, place, batch.tokens[response])
        if unpredictable is None:
            return logprobs, entropy
        zero = torch.zeros_like(logprobs)
        return torch.where(unpredictable, zero, logprobs), torch.where(unpredictable, zero, entropy)

    def states(self, batch: TensorBatch) -> torch.Tensor:
        """The last hidden state of the place that predicts each response token: [R, H].

        A response that starts its sequence takes the state of its own first token.
        """
        lengths = batch.host.lengths
        at, first = predicting(lengths, batch.host.response_lengths)
        place = torch.from_numpy(np.where(first, at + 1, at)).to(self.device)
        hidden = _hidden(self.model, self._inputs(batch)).flatten(0, 1)
        return hidden.index_select(0, place if self.packs else _padded_places(lengths, self.device)[place])

    def prompt_logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """Log-probability, at temperature 1, of every token but the first: float32 [n - 1]."""
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.device)
        place = torch.arange(len(tokens) - 1, device=self.device)
        plain = replace(self, temperature=1.0)
        with torch.no_grad():
            lengths = np.array([len(tokens)], np.int64)
            inputs = packed_inputs(ids, lengths) if self.packs else padded_inputs(ids, lengths)
            logprobs, _ = plain._at(inputs, lengths, place, ids[1:])
        return logprobs

    def _inputs(self, batch: TensorBatch) -> Inputs:
        """The forward's arguments.

        Raises:
            SlimeError: when samples bring images and the model takes none.
        """
        lengths = batch.host.lengths
        if has_images(batch.host) and not takes_images(self.model.config):
            raise SlimeError(
                f"the samples have images, but a {type(self.model).__name__} takes none; name another model."
            )
        if self.packs:
            return packed_inputs(batch.tokens, lengths)
        return {**padded_inputs(batch.tokens, lengths), **image_inputs(batch.host, self.device)}

    def _at(
        self, inputs: Inputs, lengths: IntArray, place: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of targets [R] predicted at these places [R] of the packed tokens [T]."""
        if not self.packs:
            place = _padded_places(lengths, self.device)[place]
        if self.splits_head:
            hidden = _hidden(self.model, inputs).flatten(0, 1).index_select(0, place)
            head = self.model.get_output_embeddings()
            vocab = self.model.config.get_text_config().vocab_size
            return head_logprobs(hidden, head, targets, self.temperature, vocab_size=vocab)
        if self.packs and "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            logits = _logits(self.model, {**inputs, "logits_to_keep": place})[0]
        else:
            logits = _logits(self.model, inputs).flatten(0, 1).index_select(0, place)
        return token_logprobs(logits, targets, self.temperature)


def load_policy(args: argparse.Namespace, device: torch.device, directory: str | None = None) -> Policy:
    """Load `--model`, or the model of another directory.

    A probe finds out whether its sequences can be packed and its head split off.
    """
    dtype = args.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    register_attention()
    transformers_logging.disable_progress_bar()
    model = from_pretrained(directory or args.model, getattr(torch, dtype))
    torch.nn.Module.to(model, device)
    # dropout would give one token several probabilities, so the model stays in evaluation mode
    model.eval()
    with torch.no_grad():
        packs = _can_pack(model)
        splits = _can_split_head(model, packs)
    return Policy(model, device, args.temperature if args.temperature > 0 else 1.0, packs, splits)


def named_weights(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors by name, contiguous, on its device, floating-point ones as `dtype`.

    One that shares another's memory (a tied output head) comes once, under its first name.
    """
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in model.state_dict().items():
        memory = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and memory in seen:
            continue
        seen.add(memory)
        kept = dtype if tensor.is_floating_point() else tensor.dtype
        yield name, tensor.detach().to(kept).contiguous()


def packed_inputs(tokens: torch.Tensor, lengths: IntArray) -> Inputs:
    """The forward's arguments for [T] tokens as one row, with positions that restart at each sequence."""
    total = int(lengths.sum())
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    positions = torch.from_numpy(np.arange(total) - np.repeat(starts, lengths)).to(tokens.device)
    packed = pack(lengths[lengths > 0], tokens.device)
    return {"input_ids": tokens[None], "position_ids": positions[None], "use_cache": False, "packed": packed}


def padded_inputs(tokens: torch.Tensor, lengths: IntArray) -> Inputs:
    """The forward's arguments for the same tokens as right-padded rows [S, L] with a mask."""
    shape = (len(lengths), int(lengths.max()))
    places = _padded_places(lengths, tokens.device)
    rows = tokens.new_zeros(shape[0] * shape[1]).index_copy(0, places, tokens).view(shape)
    mask = torch.arange(shape[1], device=tokens.device) < torch.from_numpy(lengths).to(tokens.device)[:, None]
    return {"input_ids": rows, "attention_mask": mask.long(), "use_cache": False}


def _padded_places(lengths: IntArray, device: torch.device) -> torch.Tensor:
    """[T] flat place of each packed token in the padded rows."""
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    within = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
    return torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths) * int(lengths.max()) + within).to(device)


def _hidden(model: PreTrainedModel, inputs: Inputs) -> torch.Tensor:
    states: torch.Tensor = model.base_model(**inputs)[0]
    return states


def _logits(model: PreTrainedModel, inputs: Inputs) -> torch.Tensor:
    output: Any = model(**inputs)
    logits: torch.Tensor = output.logits
    return logits


def _probe_tokens(model: PreTrainedModel) -> torch.Tensor:
    vocab = model.config.get_text_config().vocab_size
    counted = torch.arange(1, int(PROBE_LENGTHS.sum()) + 1, device=model.device)
    return counted * 7919 % int(vocab)


def _can_pack(model: PreTrainedModel) -> bool:
    """Give the model packed attention if it then computes what it does on padded rows; otherwise leave it as it was."""
    before = model.config._attn_implementation
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if takes_images(model.config):
        return _refuse(model, before, "images need rows of their own")
    if not kinds <= {"full_attention", "sliding_attention"} or not model._supports_attention_backend:
        return _refuse(model, before, "its layers do not all go through the attention interface")
    tokens = _probe_tokens(model)
    expected = _logits(model, padded_inputs(tokens, PROBE_LENGTHS)).flatten(0, 1)
    expected = expected[_padded_places(PROBE_LENGTHS, tokens.device)]
    try:
        model.set_attn_implementation(ATTENTION)
        got = _logits(model, packed_inputs(tokens, PROBE_LENGTHS))[0]
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return _refuse(model, before, f"{type(error).__name__}: {error}")
    tolerance = 1e-4 if got.dtype == torch.float32 else 3e-2
    off = ((got - expected).abs().max() / expected.abs().max()).item()
    return off <= tolerance or _refuse(model, before, f"packed logits are off by {off:.1e} of the largest")


def _refuse(model: PreTrainedModel, attention: str, why: str) -> bool:
    if model.config._attn_implementation != attention:
        model.set_attn_implementation(attention)
    logger.info("sequences of %s are padded instead of packed: %s", type(model).__name__, why)
    return False


def _can_split_head(model: PreTrainedModel, packs: bool) -> bool:
    """Whether the output layer alone, applied to the last hidden state, gives the very logits of the model."""
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return False
    tokens = _probe_tokens(model)
    inputs = packed_inputs(tokens, PROBE_LENGTHS) if packs else padded_inputs(tokens, PROBE_LENGTHS)
    try:
        hidden = _hidden(model, inputs)
        # bit for bit: a cap or a scale on the logits may change small ones by less than any tolerance
        return torch.equal(head(hidden), _logits(model, inputs))
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
