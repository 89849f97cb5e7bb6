"""The policy: a transformers causal LM that gives log-probabilities of response tokens."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from slime_core.errors import SlimeError
from slime_core.training.batch import TensorBatch
from slime_core.training.head_logprobs import head_logprobs
from slime_core.training.logit_scaling import LogitScaling
from slime_core.training.logprobs import token_logprobs
from slime_core.training.places import predicting, unpredictable_tokens
from slime_core.training.torch_backend.image_inputs import has_images, image_inputs
from slime_core.training.torch_backend.packing import pack
from slime_core.training.torch_backend.pretrained import takes_images
from slime_core.training.torch_backend.sharding import Entry, run
from slime_core.types import IntArray

IDLE_TOKENS = 2
"""Of the prompt that a rank computes for the others' sake."""

Inputs = dict[str, Any]


@dataclass
class Policy:
    """A model on its device, and how it may be called."""

    entry: Entry
    """The model; it computes as this module's forward."""
    device: torch.device
    dtype: torch.dtype
    """In which it computes."""
    temperature: float
    """The policy is softmax(logits / temperature), as it was when it sampled."""
    packs: bool
    """Sequences go in one packed row; otherwise in right-padded rows with a mask."""
    scaling: LogitScaling | None
    """The logits are this of the output layer of the last hidden state, so that a few at a time can be computed, and
    none for prompts; None where the model does something else."""

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model."""
        return self.entry.model

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
        chosen = batch.tokens[response]
        logprobs, entropy = run(self.entry, self._at, batch.tokens, lengths, place, chosen, self._images(batch))
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
        return self._states_at(batch.tokens, lengths, place, self._images(batch))

    def _images(self, batch: TensorBatch) -> Inputs:
        """The forward's arguments for the images of the samples.

        Raises:
            SlimeError: when the model takes none.
        """
        if not has_images(batch.host):
            return {}
        if not takes_images(self.model.config):
            raise SlimeError(
                f"the samples have images, but a {type(self.model).__name__} takes none; name another model."
            )
        return image_inputs(batch.host, self.device)

    def idle_states(self) -> torch.Tensor:
        """States [1, H] of a made-up prompt, for a rank that has nothing to compute while others have."""
        ids = torch.zeros(IDLE_TOKENS, dtype=torch.int64, device=self.device)
        return self._states_at(ids, np.array([IDLE_TOKENS], np.int64), ids[:1])

    def idle(self) -> torch.Tensor:
        """0, from a made-up prompt, with gradients of 0: for a rank that has nothing to compute while others have."""
        ids = torch.zeros(IDLE_TOKENS, dtype=torch.int64, device=self.device)
        logprobs, _ = run(self.entry, self._at, ids, np.array([IDLE_TOKENS], np.int64), ids[:1], ids[1:])
        return 0.0 * logprobs.sum()

    def prompt_logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """Log-probability, at temperature 1, of every token but the first: float32 [n - 1]."""
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.device)
        place = torch.arange(len(tokens) - 1, device=self.device)
        plain = replace(self, temperature=1.0)
        with torch.no_grad():
            logprobs, _ = run(self.entry, plain._at, ids, np.array([len(tokens)], np.int64), place, ids[1:])
        return logprobs

    def _at(
        self, tokens: torch.Tensor, lengths: IntArray, place: torch.Tensor, targets: torch.Tensor, *images: Inputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of targets [R] predicted at these places [R] of the packed tokens [T]."""
        logprobs, entropy = self._views_at(tokens, lengths, place, targets, *images)
        # FSDP2 would lose its hook on a view that a loss changes in place
        return logprobs.clone(), entropy.clone()

    def _views_at(
        self, tokens: torch.Tensor, lengths: IntArray, place: torch.Tensor, targets: torch.Tensor, *images: Inputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.scaling is not None:
            hidden = self._states_at(tokens, lengths, place, *images)
            head = self.model.get_output_embeddings()
            vocab = self.model.config.get_text_config().vocab_size
            return head_logprobs(hidden, head, targets, self.temperature, vocab_size=vocab, scaling=self.scaling)
        inputs, place = self._laid_out(tokens, lengths, place, *images)
        if self.packs and "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            logits = logits_of(self.model, {**inputs, "logits_to_keep": place})[0]
        else:
            logits = logits_of(self.model, inputs).flatten(0, 1).index_select(0, place)
        return token_logprobs(logits, targets, self.temperature)

    def _states_at(self, tokens: torch.Tensor, lengths: IntArray, place: torch.Tensor, *images: Inputs) -> torch.Tensor:
        """Last hidden states [R, H] at these places [R] of the packed tokens [T]."""
        inputs, place = self._laid_out(tokens, lengths, place, *images)
        return hidden_of(self.model, inputs).flatten(0, 1).index_select(0, place)

    def _laid_out(
        self, tokens: torch.Tensor, lengths: IntArray, place: torch.Tensor, *images: Inputs
    ) -> tuple[Inputs, torch.Tensor]:
        """The forward's arguments, and where these places are in its flattened output."""
        if self.packs:
            return packed_inputs(tokens, lengths), place
        inputs = padded_inputs(tokens, lengths)
        for some in images:
            inputs |= some
        return inputs, padded_places(lengths, self.device)[place]


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
    places = padded_places(lengths, tokens.device)
    rows = tokens.new_zeros(shape[0] * shape[1]).index_copy(0, places, tokens).view(shape)
    mask = torch.arange(shape[1], device=tokens.device) < torch.from_numpy(lengths).to(tokens.device)[:, None]
    return {"input_ids": rows, "attention_mask": mask.long(), "use_cache": False}


def padded_places(lengths: IntArray, device: torch.device) -> torch.Tensor:
    """[T] flat place of each packed token in the padded rows."""
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    within = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
    return torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths) * int(lengths.max()) + within).to(device)


def hidden_of(model: PreTrainedModel, inputs: Inputs) -> torch.Tensor:
    """The model's last hidden states."""
    states: torch.Tensor = model.base_model(**inputs)[0]
    return states


def logits_of(model: PreTrainedModel, inputs: Inputs) -> torch.Tensor:
    """The model's logits."""
    output: Any = model(**inputs)
    logits: torch.Tensor = output.logits
    return logits
