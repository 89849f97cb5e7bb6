"""Packed attention: all sequences of a micro-batch in one row [1, T], each attending only to itself.

Linear layers see no padding, nor does the attention where flash-attn is installed (`flash.py`). Elsewhere it lays the
tokens out as right-padded rows [B, H, L, D], where causality needs no mask (no token looks to its right, where the
padding is), and gathers them back. Rows of similar length share a block, so that one long sequence does not pad all
others.

The function is registered with transformers' AttentionInterface under a name without a mask function, so models build
no mask. The boundaries travel as the keyword argument `packed` of the model's forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from slime_core.training.torch_backend.flash import flash_attention, flash_kernel
from slime_core.types import IntArray

ATTENTION = "slime_packed"
"""Our name in transformers' AttentionInterface."""

MAX_PADDING = 0.25
"""Padding a real token, above which a block is split in two."""

MIN_PADDING = 512
"""Padded places that are cheaper than another block."""


@dataclass(frozen=True)
class Block:
    """Consecutive sequences of a packed row that share one padded layout [B, L]."""

    start: int
    """First packed token."""
    end: int
    num_rows: int
    max_length: int
    source: torch.Tensor | None
    """[B * L] token (counted from `start`) at each padded place, any where it is padding; None: nothing is padded."""
    places: torch.Tensor | None
    """[end - start] padded place of each token."""


@dataclass(frozen=True)
class Packed:
    """The sequences of one packed row."""

    blocks: tuple[Block, ...]
    bounds: torch.Tensor
    """[sequences + 1] int32, the first token of each, and the number of all."""
    max_length: int


def pack(lengths: IntArray, device: torch.device) -> Packed:
    """Lay out sequences of these lengths (none 0; best sorted), which lie one after the other in the packed row."""
    blocks: list[Block] = []
    first, start, total, longest = 0, 0, 0, 0
    for row, length in enumerate(lengths.tolist()):
        padded = (row + 1 - first) * max(longest, length)
        if row > first and padded - total - length > max(MIN_PADDING, MAX_PADDING * (total + length)):
            blocks.append(_block(lengths[first:row], start, device))
            first, start, total, longest = row, start + total, 0, 0
        total, longest = total + length, max(longest, length)
    bounds = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)
    return Packed((*blocks, _block(lengths[first:], start, device)), bounds, int(lengths.max()))


def _block(lengths: IntArray, start: int, device: torch.device) -> Block:
    num_rows, longest, total = len(lengths), int(lengths.max()), int(lengths.sum())
    if num_rows * longest == total:
        return Block(start, start + total, num_rows, longest, None, None)
    row = np.repeat(np.arange(num_rows), lengths)
    within = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    places = row * longest + within
    source = np.zeros(num_rows * longest, np.int64)
    source[places] = np.arange(total)
    return Block(
        start,
        start + total,
        num_rows,
        longest,
        torch.from_numpy(source).to(device),
        torch.from_numpy(places.astype(np.int64)).to(device),
    )


class _Pad(torch.autograd.Function):
    """Tokens [N, ...] -> padded places [B * L, ...]. Backward gathers instead of the slower scatter-add."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, source: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        return tokens.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        # a padded place is seen by padded queries alone, whose output nobody reads: its gradient is 0
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


class _Unpad(torch.autograd.Function):
    """Padded places [B * L, ...] -> tokens [N, ...]."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.size = padded.shape[0]
        return padded.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        padded = grads[0].new_zeros(ctx.size, *grads[0].shape[1:])
        return padded.index_copy_(0, ctx.saved_tensors[0], grads[0]), None


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: Packed,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each packed sequence, as transformers calls an attention function.

    Args:
        module: the attention layer, not used.
        query: [1, H, T, D].
        key: [1, K, T, D], K dividing H.
        value: [1, K, T, E].
        attention_mask: None, as no mask function is registered.
        packed: the sequences.
        scaling: of the scores; None: 1 / sqrt(D).
        sliding_window: how many tokens one sees, itself included; None: all before it.
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2).
        s_aux: attention sinks; refused.
        position_bias: refused.
        **kwargs: what other attention functions take; dropout is not applied (a policy has one probability a token).

    Returns:
        [1, T, H, E] and None.

    Raises:
        ValueError: for a mask, sinks or a bias; the caller then falls back to padded rows.
    """
    if attention_mask is not None or s_aux is not None or position_bias is not None:
        raise ValueError("packed attention takes no mask, sinks or bias")
    kernel = flash_kernel(query.device, query.dtype)
    if kernel is not None:
        shape, masks = (packed.bounds, packed.max_length), {"scaling": scaling, "window": sliding_window}
        return flash_attention(kernel, query, key, value, *shape, **masks, softcap=softcap), None
    outputs = []
    for block in packed.blocks:
        parts = (_to_rows(x, block) for x in (query, key, value))
        out = _causal(*parts, scaling=scaling, window=sliding_window, softcap=softcap)
        flat = out.transpose(1, 2).reshape(block.num_rows * block.max_length, out.shape[1], out.shape[3])
        outputs.append(flat if block.places is None else _Unpad.apply(flat, block.places))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


def _to_rows(states: torch.Tensor, block: Block) -> torch.Tensor:
    """[1, H, T, D] -> the block's [B, H, L, D]."""
    tokens = states[0].transpose(0, 1)[block.start : block.end]
    if block.source is not None:
        tokens = _Pad.apply(tokens, block.source, block.places)
    rows: torch.Tensor = tokens.unflatten(0, (block.num_rows, block.max_length))
    return rows.transpose(1, 2)


def _causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Causal attention over rows: [B, H, L, D] and [B, K, L, D] -> [B, H, L, E]."""
    length = query.shape[2]
    banded = window is not None and length > window
    if softcap is None and not banded:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    place = torch.arange(length, device=query.device)
    distance = place[:, None] - place[None, :]
    seen = (distance >= 0) & (distance < window) if banded and window is not None else distance >= 0
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if softcap is None:
        # of the kernels for GPUs that take a mask and keep no scores, none takes fewer heads of keys than of queries
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling)
    scores = (query @ key.transpose(2, 3)) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~seen, float("-inf"))
    return torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype) @ value


def register_attention() -> None:
    """Make `ATTENTION` a name that transformers knows."""
    AttentionInterface.register(ATTENTION, packed_attention)
