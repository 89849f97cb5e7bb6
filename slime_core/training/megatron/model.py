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
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoConfig

from slime_core.errors import OptionError
from slime_core.training.batch import TensorBatch
from slime_core.training.megatron.config import megatron_config, rotary_arguments
from slime_core.training.megatron.context import Cut
from slime_core.training.megatron.families.registry import find_family
from slime_core.training.megatron.outputs import PackedModel, PolicyModel, ValueModel
from slime_core.training.megatron.routing import Given, Layout, Noted
from slime_core.training.megatron.rules import Dimensions, Family, padded_vocab
from slime_core.training.megatron.spec import PackedSequences, block_spec
from slime_core.training.places import predicting, unpredictable_tokens
from slime_core.training.torch_backend.packing import pack
from slime_core.types import IntArray

Consume = Callable[..., torch.Tensor | None]
"""(number of the row, the model's outputs [R]...) -> the scalar to differentiate, None in a forward alone."""


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
    experts: torch.Tensor | None = None
    """[T, layers, k] where the tokens must go at every router of this stage; None where they go as they choose."""

    @classmethod
    def of(cls, batch: TensorBatch, experts: torch.Tensor | None = None) -> Row:
        """The response tokens of a micro-batch.

        Args:
            batch: the micro-batch.
            experts: see `Row.experts`.

        Raises:
            SlimeError: when a token is trained that nothing precedes.
        """
        at, first = predicting(batch.host.lengths, batch.host.response_lengths)
        unpredictable = unpredictable_tokens(batch, first)
        places = torch.from_numpy(np.where(first, at + 1, at)).to(batch.device)
        targets = batch.tokens[torch.from_numpy(at + 1).to(batch.device)]
        return cls(batch.tokens, batch.host.lengths, places, targets, unpredictable, experts)


@dataclass
class MegatronModel:
    """This rank's part of a model, and what is known of the whole."""

    module: Any
    """PackedModel, or the DistributedDataParallel around it."""
    hf: Any
    """The transformers configuration."""
    family: Family
    config: TransformerConfig
    dims: Dimensions
    device: torch.device
    temperature: float

    @property
    def bare(self) -> PackedModel:
        """The module without what is around it."""
        bare: PackedModel = self.module if isinstance(self.module, PackedModel) else self.module.module
        return bare

    @property
    def is_critic(self) -> bool:
        """Whether it gives values, by a head that no file has."""
        return isinstance(self.bare, ValueModel)

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return bool(self.hf.tie_word_embeddings)

    def run(
        self,
        rows: Sequence[Row],
        consume: Consume,
        *,
        backward: bool,
        temperature: float | None = None,
        note: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        """Send packed rows through all stages; every data-parallel rank must bring as many.

        Args:
            rows: at least one; one without places takes part and nothing more.
            consume: called on the last stage, in order, for rows with places.
            backward: differentiate what `consume` returns, and sum the gradients over the data-parallel ranks.
            temperature: instead of the policy's own.
            note: called on every stage, in order, with the number of a row and where its tokens went [T, layers, k] at
                each router of the stage.
        """
        chosen = self.temperature if temperature is None else temperature

        def step(numbers: Any, module: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            number = next(numbers)
            inputs = self._inputs(rows[number], chosen, noted=note is not None)
            output = module(**inputs)
            if note is not None:
                note(number, inputs["packed_seq_params"].experts.whole())

            def loss(outputs: tuple[torch.Tensor, ...]) -> Any:
                scalar = self._consume(rows[number], number, outputs, consume)
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

    def _consume(self, row: Row, number: int, outputs: tuple[torch.Tensor, ...], consume: Consume) -> torch.Tensor:
        nothing = outputs[0].sum() * 0.0
        if not len(row.places):
            return nothing
        if row.unpredictable is not None:
            outputs = tuple(torch.where(row.unpredictable, torch.zeros_like(output), output) for output in outputs)
        scalar = consume(number, *outputs)
        return nothing if scalar is None else scalar

    def _inputs(self, row: Row, temperature: float, *, noted: bool) -> dict[str, Any]:
        """The forward's arguments, padded to what the ranks that share a row can share."""
        lengths, at = self._padded(row.lengths)
        token_places = torch.from_numpy(at).to(self.device)
        tokens = row.tokens.new_zeros(int(lengths.sum()))
        tokens[token_places] = row.tokens
        cut = None
        if self.config.context_parallel_size > 1:
            cut = Cut.of(lengths, parallel_state.get_context_parallel_group(), self.device)
            tokens = tokens[cut.own]
        layout = Layout(token_places, int(lengths.sum()), cut, self._sequence_parallel)
        experts = Noted(layout) if noted else None if row.experts is None else Given(row.experts, layout)
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
            experts=experts,
        )
        positions = torch.zeros_like(tokens)  # rotary embeddings count from the ends
        return {
            "input_ids": tokens[None],
            "position_ids": positions[None],
            "attention_mask": None,
            "packed_seq_params": sequences,
        }

    @property
    def _sequence_parallel(self) -> Any:
        """The ranks that share out a row's tokens between the matrices; None where each has all."""
        return parallel_state.get_tensor_model_parallel_group() if self.config.sequence_parallel else None

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


def build_model(
    args: argparse.Namespace, directory: str, device: torch.device, *, critic: bool = False
) -> MegatronModel:
    """This rank's part of the model in a Hugging Face directory, its weights not loaded yet.

    Args:
        args: the options.
        directory: with the config.json.
        device: of this rank.
        critic: with a head for values in place of the output layer.

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
    parts: dict[str, Any] = {
        "config": config,
        "transformer_layer_spec": block_spec(config, family.post_norms),
        "vocab_size": padded_vocab(hf.vocab_size, args.tensor_model_parallel_size),
        "max_sequence_length": hf.max_position_embeddings,
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        **rotary_arguments(hf, family),
    }
    if critic:
        module: PackedModel = ValueModel(**parts)
    else:
        shared = bool(hf.tie_word_embeddings)
        module = PolicyModel(known_tokens=hf.vocab_size, share_embeddings_and_output_weights=shared, **parts)
    module.to(device)
    _group_experts(module)
    heads = config.num_attention_heads
    dims = Dimensions(heads, config.num_query_groups or heads, config.kv_channels or 0, hf.vocab_size)
    temperature = args.temperature if args.temperature > 0 else 1.0
    return MegatronModel(module, hf, family, config, dims, device, temperature)


def _group_experts(module: torch.nn.Module) -> None:
    """Have experts' gradients summed over the ranks that have these experts.

    By itself megatron-core does that only where experts are shared out, and else takes the ranks that have the rest of
    the layer, which are others where the tensor sizes differ.
    """
    for name, parameter in module.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False
