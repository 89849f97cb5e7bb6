"""What the last stage makes of its hidden states: log-probabilities and entropy, or a critic's values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import nn
from torch.utils.checkpoint import checkpoint

from slime_core.training.head_logprobs import MAX_LOGITS
from slime_core.training.megatron.loss import vocab_parallel_logprobs
from slime_core.training.megatron.spec import PackedSequences


class PackedModel(GPTModel, ABC):
    """A GPTModel whose last stage gives float32 [R] for the response tokens of a packed row instead of logits."""

    def _postprocess(
        self, hidden_states: torch.Tensor, *args: Any, packed_seq_params: PackedSequences | None = None, **kwargs: Any
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if not self.post_process or packed_seq_params is None:
            return hidden_states
        row = packed_seq_params
        if row.places is None or row.targets is None:
            raise ValueError("a packed row names the places of its response tokens")
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        states = hidden_states[:, 0]
        if row.cut is None:
            return self.outputs(states.index_select(0, row.places), row.targets, row.temperature)
        cut = row.cut
        mine, local = cut.local(row.places)
        found = self.outputs(states.index_select(0, local), row.targets[mine], row.temperature)
        return tuple(
            cut.whole(values.new_zeros(len(cut.own)).index_put((local,), values), alike=True)[row.places]
            for values in found
        )

    @abstractmethod
    def outputs(self, states: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
        """Float32 [R] each, the same on every tensor-parallel rank.

        Args:
            states: [R, H], the last hidden states of places in the row.
            targets: [R] int64, the successors of these tokens.
            temperature: the policy's.
        """


class PolicyModel(PackedModel):
    """Gives log-probabilities and entropy."""

    def __init__(self, *, known_tokens: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._known_tokens = known_tokens
        if self.post_process and self.config.sequence_parallel:
            # the output layer sees a choice of rows from all ranks, so it cannot gather them itself
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = self.config.tensor_model_parallel_size > 1

    def outputs(self, states: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
        """Log-probability of each target, and the entropy where it was chosen."""
        rows = max(1, MAX_LOGITS // self._known_tokens)
        if len(states) <= rows:
            return self._logprobs(states, targets, temperature)
        parts = [
            checkpoint(self._logprobs, some, of_some, temperature, use_reentrant=False)
            for some, of_some in zip(states.split(rows), targets.split(rows), strict=True)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _logprobs(
        self, states: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(states[:, None], weight=weight)
        group = parallel_state.get_tensor_model_parallel_group()
        return vocab_parallel_logprobs(logits[:, 0], targets, temperature, group, self._known_tokens)


class ValueHead(nn.Linear):
    """One number a state, computed in float32; starts at 0."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        # Megatron's distributed optimizer cannot save parameters of several dtypes; their masters are float32 anyway
        super().__init__(hidden_size, 1, dtype=dtype)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[R, H] -> float32 [R]."""
        return nn.functional.linear(states.float(), self.weight.float(), self.bias.float())[:, 0]


class ValueModel(PackedModel):
    """Gives one value a place, by a head that every tensor-parallel rank has."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(share_embeddings_and_output_weights=False, **kwargs)
        if self.post_process:
            # under the name of the layer it stands for, where Megatron's checkpoints expect one
            self.output_layer = ValueHead(self.config.hidden_size, self.config.params_dtype)

    def outputs(self, states: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
        """The values alone."""
        return (self.output_layer(states),)
