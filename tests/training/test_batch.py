"""The torch view of a batch, and its splitting into micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.training.batch import TensorBatch, micro_batches
from slime_core.types import TrainBatch

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 80), st.booleans())
def test_micro_batches_hold_every_row_once_within_the_budget(lengths, budget, padded):
    sizes = np.array(lengths, np.int32)
    parts = micro_batches(sizes, np.arange(len(sizes)), budget, padded=padded)
    assert sorted(row for part in parts for row in part) == list(range(len(sizes)))
    for part in parts:
        taken = len(part) * sizes[part].max() if padded else sizes[part].sum()
        assert len(part) == 1 or taken <= budget
    assert [int(sizes[row]) for part in parts for row in part] == sorted(lengths, reverse=True)


def test_a_sample_longer_than_the_budget_is_alone():
    parts = micro_batches(np.array([3, 100, 4]), np.arange(3), 10)
    assert [part.tolist() for part in parts] == [[1], [2, 0]]


def test_select_takes_tokens_extras_and_advantages_along(samples):
    made = samples(5)
    numpy_batch = TrainBatch.from_samples(made)
    numpy_batch.per_sample = {"scale": np.arange(5.0), "kind": np.array(["a", "b", "c", "d", "e"])}
    numpy_batch.per_token = {"place": np.arange(len(numpy_batch.loss_mask))}
    batch = TensorBatch.of(numpy_batch, CPU)
    batch.advantages = batch["place"].float() * 2
    part = batch.select([3, 1])
    assert part.tokens.tolist() == [*made[3].tokens, *made[1].tokens]
    assert part.sample_index.tolist() == [3, 1]
    assert part["scale"].tolist() == [3.0, 1.0]
    assert part["kind"].tolist() == ["d", "b"]
    assert part.advantages.tolist() == (part["place"].float() * 2).tolist()
    assert part.expand(part["scale"]).tolist() == [3.0] * made[3].response_length + [1.0] * made[1].response_length
    assert part.old_logprobs is None


def test_an_unknown_key_lists_the_known(samples):
    numpy_batch = TrainBatch.from_samples(samples(2))
    numpy_batch.per_sample = {"scale": np.ones(2)}
    batch = TensorBatch.of(numpy_batch, CPU)
    assert "scale" in batch
    with pytest.raises(KeyError, match=r"'weight'.*'scale'"):
        batch["weight"]


def test_an_empty_batch_has_empty_tensors():
    batch = TensorBatch.of(TrainBatch.from_samples([]), CPU)
    assert batch.num_samples == batch.num_response_tokens == len(batch.expand(batch.rewards)) == 0
