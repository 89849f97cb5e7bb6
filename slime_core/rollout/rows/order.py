"""The order of an epoch: blocks of rows shuffled, then rows within as many blocks as memory holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slime_core.types import IntArray, spans

WINDOW_BYTES = 256 << 20
"""Bytes of row groups among which rows are shuffled, and which a reader keeps; part of the order, so never a flag."""


@dataclass(frozen=True)
class Blocks:
    """Consecutive rows that are read together: a Parquet row group, or some lines of JSONL, which hold no memory."""

    num_rows: IntArray
    """int64 [blocks]."""
    num_bytes: IntArray
    """int64 [blocks], what reading any row of the block costs in memory."""

    @classmethod
    def joined(cls, parts: list[Blocks]) -> Blocks:
        """The blocks of several files, one after the other."""
        empty = np.empty(0, np.int64)
        return cls(
            np.concatenate([empty, *(part.num_rows for part in parts)]),
            np.concatenate([empty, *(part.num_bytes for part in parts)]),
        )


def shuffled(blocks: Blocks, seed: list[int], window_bytes: int) -> IntArray:
    """A permutation of all rows, a function of the arguments alone.

    The blocks are permuted, taken into windows of at most `window_bytes` (or one block), and the rows of every window
    are permuted; so data that fits one window gets a uniform permutation, and a reader never goes back to a window.
    """
    rng = np.random.default_rng(seed)
    sequence = rng.permutation(len(blocks.num_rows))
    order: IntArray = spans(blocks.num_rows, sequence)
    first = 0
    for num_rows in _windows(blocks.num_rows[sequence].tolist(), blocks.num_bytes[sequence].tolist(), window_bytes):
        rng.shuffle(order[first : first + num_rows])
        first += num_rows
    return order


def _windows(num_rows: list[int], num_bytes: list[int], window_bytes: int) -> list[int]:
    """Rows of each window."""
    windows, held = [0], 0
    for rows, size in zip(num_rows, num_bytes, strict=True):
        if held and held + size > window_bytes:
            windows.append(0)
            held = 0
        windows[-1] += rows
        held += size
    return windows
