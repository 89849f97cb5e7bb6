"""A row cut over context-parallel ranks is whole again when put together, and all ranks have the same work."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slime_core.training.megatron.context import own_tokens

sizes = st.integers(1, 8)
chunk_counts = st.lists(st.integers(1, 20), min_size=1, max_size=6)


def lengths_of(chunks, size):
    return np.array(chunks, np.int64) * 2 * size


@given(size=sizes, chunks=chunk_counts)
def test_every_token_is_on_one_rank(size, chunks):
    lengths = lengths_of(chunks, size)
    parts = [own_tokens(lengths, rank, size) for rank in range(size)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(lengths.sum()))
    assert len({len(part) for part in parts}) == 1


@given(size=sizes, chunks=chunk_counts)
def test_the_ranks_look_back_at_as_many_tokens(size, chunks):
    lengths = lengths_of(chunks, size)
    seen = np.concatenate([np.arange(length) for length in lengths])
    assert len({int(seen[own_tokens(lengths, rank, size)].sum()) for rank in range(size)}) == 1


def test_each_rank_has_a_chunk_from_either_end_of_every_sequence():
    assert own_tokens(np.array([4, 8]), 0, 2).tolist() == [0, 3, 4, 5, 10, 11]
    assert own_tokens(np.array([4, 8]), 1, 2).tolist() == [1, 2, 6, 7, 8, 9]
