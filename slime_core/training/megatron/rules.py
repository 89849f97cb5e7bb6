"""How a model family's tensors are called and cut in Megatron: one table, read in both directions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Dimensions:
    """What a layout must know of the model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Of the Hugging Face model; Megatron's is padded to a multiple of the tensor-parallel size."""


class Layout(Protocol):
    """How Hugging Face tensors become the shards of one Megatron parameter, and back."""

    def shard(self, tensors: Tensors, rank: int, size: int, dims: Dimensions) -> torch.Tensor:
        """The shard of tensor-parallel rank `rank` of `size`."""

    def whole(self, shards: Tensors, dims: Dimensions) -> list[torch.Tensor]:
        """The Hugging Face tensors of the shards of all ranks."""


@dataclass(frozen=True)
class Replicated:
    """The same on every rank: norms, routers."""

    def shard(self, tensors: Tensors, rank: int, size: int, dims: Dimensions) -> torch.Tensor:
        """The tensor."""
        return tensors[0]

    def whole(self, shards: Tensors, dims: Dimensions) -> list[torch.Tensor]:
        """Rank 0's."""
        return [shards[0]]


@dataclass(frozen=True)
class Split:
    """Cut along one dimension: 0 where the output is cut (column parallel), 1 where the input is (row parallel)."""

    dim: int

    def shard(self, tensors: Tensors, rank: int, size: int, dims: Dimensions) -> torch.Tensor:
        """A `size`-th."""
        return tensors[0].chunk(size, self.dim)[rank]

    def whole(self, shards: Tensors, dims: Dimensions) -> list[torch.Tensor]:
        """The parts end to end."""
        return [torch.cat(list(shards), self.dim)]


@dataclass(frozen=True)
class Vocabulary:
    """Rows of tokens, the last rank's padded with zeros."""

    def shard(self, tensors: Tensors, rank: int, size: int, dims: Dimensions) -> torch.Tensor:
        """`padded_vocab / size` rows."""
        rows = padded_vocab(dims.vocab_size, size) // size
        mine = tensors[0][rank * rows : (rank + 1) * rows]
        return torch.cat([mine, mine.new_zeros(rows - len(mine), *mine.shape[1:])])

    def whole(self, shards: Tensors, dims: Dimensions) -> list[torch.Tensor]:
        """Without the padding."""
        return [torch.cat(list(shards))[: dims.vocab_size]]


@dataclass(frozen=True)
class GateUp:
    """A gated MLP's two inputs, gate over up on every rank; `fused` where Hugging Face has them in one tensor too."""

    fused: bool = False

    def shard(self, tensors: Tensors, rank: int, size: int, dims: Dimensions) -> torch.Tensor:
        """[2 * ffn / size, H]."""
        gate, up = tensors[0].chunk(2) if self.fused else tensors
        return torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])

    def whole(self, shards: Tensors, dims: Dimensions) -> list[torch.Tensor]:
        """[gate, up], or both in one."""
        halves = [shard.chunk(2) for shard in shards]
        gate, up = (torch.cat([half[which] for half in halves]) for which in (0, 1))
        return [torch.cat([gate, up])] if self.fused else [gate, up]


@dataclass(frozen=True)
class Qkv:
    """Query, key and value, weights or biases: Megatron lays out one key-value group after the other, [q... k v]."""

    def shard(self, tensors: Tensors, rank: int, size: int, dims: Dimensions) -> torch.Tensor:
        """[(heads + 2 groups) * head_dim / size, ...]; a group is cut where there are fewer than ranks."""
        groups = dims.num_kv_heads
        parts = [tensor.reshape(groups, -1, dims.head_dim, *tensor.shape[1:]) for tensor in tensors]
        return torch.cat(parts, 1).reshape(-1, *tensors[0].shape[1:]).chunk(size)[rank]

    def whole(self, shards: Tensors, dims: Dimensions) -> list[torch.Tensor]:
        """[query, key, value]."""
        rest = shards[0].shape[1:]
        per_group = dims.num_heads // dims.num_kv_heads
        mixed = torch.cat(list(shards)).reshape(dims.num_kv_heads, per_group + 2, dims.head_dim, *rest)
        return [part.reshape(-1, *rest) for part in mixed.split([per_group, 1, 1], 1)]


def padded_vocab(vocab_size: int, tensor_parallel_size: int) -> int:
    """The least multiple of the tensor-parallel size that holds the vocabulary."""
    return -(-vocab_size // tensor_parallel_size) * tensor_parallel_size


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter of every layer (and expert), and the Hugging Face tensors it holds."""

    megatron: str
    """The parameter, with `{layer}` and `{expert}` for their numbers in the whole model."""
    hugging_face: tuple[str, ...]
    """The tensors, with the same placeholders."""
    layout: Layout

    def match(self, name: str) -> dict[str, str] | None:
        """The placeholders' values where the rule is for this parameter."""
        pattern = re.escape(self.megatron).replace(r"\{layer\}", r"(?P<layer>\d+)")
        found = re.fullmatch(pattern.replace(r"\{expert\}", r"(?P<expert>\d+)"), name)
        return None if found is None else found.groupdict()


@dataclass(frozen=True)
class Family:
    """A model family: what its Megatron configuration has beyond Llama's, and its rules."""

    rules: tuple[Rule, ...]
    config: Callable[[Any], Mapping[str, Any]] = field(default=lambda config: {})
    """Of a transformers configuration, the fields of Megatron's TransformerConfig that differ from Llama's."""
    rotary: Callable[[Any], Mapping[str, Any]] = field(default=lambda config: {})
    """Likewise, the rotary arguments of Megatron's GPTModel."""
    post_norms: bool = False
    """Attention and MLP outputs are normalised before they join the residual stream."""
