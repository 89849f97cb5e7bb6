"""A causal LM in Megatron's parts: this rank's part of it, and forward and backward through all of them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig

from slime_core.errors import OptionError
from slime_core.training.batch import TensorBatch
from slime_core.training.logprobs import MAX_LOGITS
from slime_core.training.megatron.config import megatron_config, rotary_arguments
from slime_core.training.megatron.context import Cut
from slime_core.training.megatron.families.registry import find_family
from slime_core.training.megatron.loss import vocab_parallel_logprobs
from slime_core.training.megatron.rules import Dimensions, Family, padded_vocab
from slime_core.training.megatron.spec import PackedSequences, block_spec
from slime_core.training.places import predicting, unpredictable_tokens
from slime_core.training.torch_backend.packing import pack
from slime_core.types import IntArray

Consume = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor | None]
"""(number of the row, logprobs [R], entropy [R]) -> the scalar to differentiate, None in a forward alone."""


@dataclass(frozen=True)
class Row:
    """One packed row, and what is asked of it."""

    tokens: torch.Tensor
    """[T] int64."""
    lengths: IntArray
    """[S] of its sequences."""
    places: torch.Tensor
    """[R] int64, tokens whose successors' log-probabilities are wanted."""
    targets: torch.Tensor
    """[R] int64, the successors."""
    unpredictable: torch.Tensor | None = None
    """[R] bool, those that nothing precedes, which get 0; None where there are none."""

    @classmethod
    def of(cls, batch: TensorBatch) -> Row:
        """The response tokens of a micro-batch.

        Raises:
            SlimeError: when a token is trained that nothing precedes.
        """
        at, first = predicting(batch.host.lengths, batch.host.response_lengths)
        unpredictable = unpredictable_tokens(batch, first)
        places = torch.from_numpy(np.where(first, at + 1, at)).to(batch.device)
        targets = batch.tokens[torch.from_numpy(at + 1).to(batch.device)]
        return cls(batch.tokens, batch.host.lengths, places, targets, unpredictable)


class PolicyModel(GPTModel):
    """A GPTModel whose last stage gives log-probabilities and entropy instead of logits: two float32 [R]."""

    def __init__(self, *, known_tokens: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._known_tokens = known_tokens
        if self.post_process and self.config.sequence_parallel:
            # the output layer sees a choice of rows from all ranks, so it cannot gather them itself
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = self.config.tensor_model_parallel_size > 1

    def _postprocess(
        self, hidden_states: torch.Tensor, *args: Any, packed_seq_params: PackedSequences | None = None, **kwargs: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if not self.post_process or packed_seq_params is None:
            return hidden_states
        row = packed_seq_params
        if row.places is None or row.targets is None:
            raise ValueError("a packed row names the places of its response tokens")
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        if row.cut is None:
            return self._in_chunks(hidden_states[:, 0].index_select(0, row.places), row.targets, row.temperature)
        mine, local = row.cut.local(row.places)
        found = self._in_chunks(hidden_states[:, 0].index_select(0, local), row.targets[mine], row.temperature)
        logprobs, entropy = (
            row.cut.whole(values.new_zeros(len(row.cut.own)).index_put((local,), values), alike=True)[row.places]
            for values in found
        )
        return logprobs, entropy

    def _in_chunks(
        self, states: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
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


@dataclass
class MegatronModel:
    """This rank's part of a model, and what is known of the whole."""

    module: Any
    """PolicyModel, or the DistributedDataParallel around it."""
    hf: Any
    """The transformers configuration."""
    family: Family
    config: TransformerConfig
    dims: Dimensions
    device: torch.device
    temperature: float

    @property
    def policy(self) -> PolicyModel:
        """The bare module."""
        bare: PolicyModel = self.module if isinstance(self.module, PolicyModel) else self.module.module
        return bare

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return bool(self.hf.tie_word_embeddings)

    def run(self, rows: Sequence[Row], consume: Consume, *, backward: bool, temperature: float | None = None) -> None:
        """Send packed rows through all stages; every data-parallel rank must bring as many.

        Args:
            rows: at least one; one without places takes part and nothing more.
            consume: called on the last stage, in order, for rows with places.
            backward: differentiate what `consume` returns, and sum the gradients over the data-parallel ranks.
            temperature: instead of the policy's own.
        """
        chosen = self.temperature if temperature is None else temperature

        def step(numbers: Any, module: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            number = next(numbers)
            output = module(**self._inputs(rows[number], chosen))

            def loss(output: tuple[torch.Tensor, torch.Tensor]) -> Any:
                scalar = self._consume(rows[number], number, *output, consume)
                return scalar, torch.tensor(1, dtype=torch.int, device=self.device), {}

            return output, loss

        with torch.set_grad_enabled(backward):
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(range(len(rows))),
                model=[self.module],
                num_microbatches=len(rows),
                seq_length=1,  # rows tell their own lengths
                micro_batch_size=1,
                forward_only=not backward,
            )

    def _consume(
        self, row: Row, number: int, logprobs: torch.Tensor, entropy: torch.Tensor, consume: Consume
    ) -> torch.Tensor:
        nothing = logprobs.sum() * 0.0
        if not len(row.places):
            return nothing
        if row.unpredictable is not None:
            zero = torch.zeros_like(logprobs)
            logprobs = torch.where(row.unpredictable, zero, logprobs)
            entropy = torch.where(row.unpredictable, zero, entropy)
        scalar = consume(number, logprobs, entropy)
        return nothing if scalar is None else scalar

    def _inputs(self, row: Row, temperature: float) -> dict[str, Any]:
        """The forward's arguments, padded to what the ranks that share a row can share."""
        lengths, at = self._padded(row.lengths)
        token_places = torch.from_numpy(at).to(self.device)
        tokens = row.tokens.new_zeros(int(lengths.sum()))
        tokens[token_places] = row.tokens
        cut = None
        if self.config.context_parallel_size > 1:
            cut = Cut.of(lengths, parallel_state.get_context_parallel_group(), self.device)
            tokens = tokens[cut.own]
        ends = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(self.device)
        longest = int(lengths.max())
        sequences = PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            packed=pack(lengths, self.device),
            places=token_places[row.places],
            targets=row.targets,
            temperature=temperature,
            cut=cut,
        )
        positions = torch.zeros_like(tokens)  # rotary embeddings count from the ends
        return {
            "input_ids": tokens[None],
            "position_ids": positions[None],
            "attention_mask": None,
            "packed_seq_params": sequences,
        }

    def _padded(self, lengths: IntArray) -> tuple[IntArray, IntArray]:
        """Lengths that divide over the ranks, and where each token of the row as it is goes.

        Context parallelism cuts every sequence, sequence parallelism the row; FP8 counts in 16s or 32s.
        """
        each = 2 * self.config.context_parallel_size if self.config.context_parallel_size > 1 else 1
        row = self.config.context_parallel_size * self.config.tensor_model_parallel_size
        row = math.lcm(each, row * (get_fp8_align_size(self.config.fp8_recipe) if self.config.fp8 else 1))
        lengths = lengths[lengths > 0].astype(np.int64)
        padded = -(-lengths // each) * each
        total = int(padded.sum())
        at = np.repeat(np.cumsum(padded) - padded - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
        if rest := -total % row if total else row:
            padded = np.append(padded, rest)
        return padded, at


def build_model(args: argparse.Namespace, directory: str, device: torch.device) -> MegatronModel:
    """This rank's part of the model in a Hugging Face directory, its weights not loaded yet.

    Raises:
        OptionError: when the family has no rules, or its configuration no counterpart.
    """
    try:
        hf = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise OptionError(f"the model {directory} cannot be read: {error}") from None
    family = find_family(hf.model_type)
    dtype = getattr(torch, args.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    config = megatron_config(args, hf, family, dtype, device.type == "cpu")
    first = parallel_state.is_pipeline_first_stage()
    last = parallel_state.is_pipeline_last_stage()
    module = PolicyModel(
        known_tokens=hf.vocab_size,
        config=config,
        transformer_layer_spec=block_spec(config, family.post_norms),
        vocab_size=padded_vocab(hf.vocab_size, args.tensor_model_parallel_size),
        max_sequence_length=hf.max_position_embeddings,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=bool(hf.tie_word_embeddings),
        **rotary_arguments(hf, family),
    ).to(device)
    heads = config.num_attention_heads
    dims = Dimensions(heads, config.num_query_groups or heads, config.kv_channels or 0, hf.vocab_size)
    temperature = args.temperature if args.temperature > 0 else 1.0
    return MegatronModel(module, hf, family, config, dims, device, temperature)
