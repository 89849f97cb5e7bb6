"""The key-value cache of the embedded engine: one row ("slot") a sequence, all layers of equal length.

The running sequences fill a dense prefix of the slots, so a decode step reads plain views of the buffers. Buffers grow
in blocks when a row or a longer sequence needs it, and are given back when the engine is idle.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

TOKEN_BLOCK = 64
SLOT_BLOCK = 8


class SlotCache(Cache):
    """Keys and values as [slots, kv_heads, tokens, head_dim] a layer, written at explicit (slot, position) pairs.

    Before each forward, `select` says which rows take part, where their new tokens go and how many positions attention
    looks at. One extra last position takes the writes of padding tokens and is never read.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: list[torch.Tensor | None] = []
        self.values: list[torch.Tensor | None] = []
        self.slots = 0
        self.tokens = 0
        self._rows = slice(0, 0)
        self._row_index = torch.empty(0, dtype=torch.int64)
        self._positions = torch.empty(0, 0, dtype=torch.int64)
        self._width = 0

    @property
    def padding_position(self) -> int:
        """The position that swallows the writes of padding tokens."""
        return self.tokens

    def reserve(self, slots: int, tokens: int) -> None:
        """Make room for that many rows and positions, which must cover every row in use.

        Contents stay. A buffer that must grow on one side is cropped on the other to what is needed now, so one long
        sequence of the past costs no memory for ever.
        """
        if slots <= self.slots and tokens <= self.tokens:
            return
        new_slots = _grown(slots, self.slots, SLOT_BLOCK)
        new_tokens = _grown(tokens, self.tokens, TOKEN_BLOCK)
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                if old is not None:  # one layer at a time: old and new never exist twice over
                    buffers[layer] = self._resized(old, new_slots, new_tokens)
        self.slots, self.tokens = new_slots, new_tokens

    def _resized(self, old: torch.Tensor, slots: int, tokens: int) -> torch.Tensor:
        new = _allocate(old, slots, tokens + 1)
        kept_slots, kept_tokens = min(slots, self.slots), min(tokens, self.tokens)
        new[:kept_slots, :, :kept_tokens] = old[:kept_slots, :, :kept_tokens]
        return new

    def release(self) -> None:
        """Give all memory back; only when no row is in use."""
        self.keys, self.values = [], []
        self.slots = self.tokens = 0

    def select(self, start: int, stop: int, positions: torch.Tensor, width: int) -> None:
        """Prepare a forward of rows start..stop.

        positions: [rows, queries] where to write the new tokens; width: how many positions attention looks at.
        """
        self._rows = slice(start, stop)
        self._row_index = torch.arange(start, stop)
        self._positions = positions
        self._width = width

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new states [rows, heads, queries, dim]; return views [rows, heads, width, dim] of all the stored."""
        keys = self._write(self.keys, layer_idx, key_states)
        values = self._write(self.values, layer_idx, value_states)
        return keys, values

    def _write(self, buffers: list[torch.Tensor | None], layer_idx: int, states: torch.Tensor) -> torch.Tensor:
        while len(buffers) <= layer_idx:
            buffers.append(None)
        buffer = buffers[layer_idx]
        if buffer is None:
            buffer = buffers[layer_idx] = _allocate(states, self.slots, self.tokens + 1)
        if states.shape[2] == 1:
            buffer[self._row_index, :, self._positions[:, 0]] = states[:, :, 0]
        else:
            buffer[self._row_index[:, None], :, self._positions] = states.transpose(1, 2)
        return buffer[self._rows, :, : self._width]

    def copy_row(self, source: int, target: int, width: int) -> None:
        """Copy the first `width` positions of one row onto another."""
        for buffer in (*self.keys, *self.values):
            if buffer is not None:
                buffer[target, :, :width] = buffer[source, :, :width]

    def fan_out(self, sources: torch.Tensor, start: int, width: int) -> None:
        """Copy the first `width` positions of rows `sources` [n] onto the rows start, start+1, ..."""
        for buffer in (*self.keys, *self.values):
            if buffer is not None:
                buffer[start : start + len(sources), :, :width] = buffer[sources, :, :width]

    def bytes_per_token(self) -> int:
        """Memory of one position of one row over all layers, in bytes; 0 before the first forward."""
        tensors = [b for b in (*self.keys, *self.values) if b is not None]
        return sum(b.shape[1] * b.shape[3] * b.element_size() for b in tensors)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Part of transformers' interface: positions are explicit here, so there is no single length."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Part of transformers' interface: (key length, offset) of the current forward."""
        return self._width, 0


@torch.inference_mode(mode=False)  # a plain tensor may be written in and out of inference mode
def _allocate(like: torch.Tensor, slots: int, tokens: int) -> torch.Tensor:
    """A buffer for states shaped like [rows, heads, tokens, dim]; zeros, as what a mask hides must still be finite."""
    return like.new_zeros(slots, like.shape[1], tokens, like.shape[3])


def _grown(needed: int, have: int, block: int) -> int:
    """A size for `needed`, in whole blocks; by a quarter at least where it grows, as each growth copies everything."""
    if needed > have:
        needed = max(needed, have * 5 // 4)
    return -(-needed // block) * block
