"""Pieces of bounded size that are together the whole model, in order."""

from __future__ import annotations

import pickle

import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.weights.buckets import buckets
from slime_core.weights.tensor import TensorTransport, lay_out

SIZES = st.lists(st.tuples(st.integers(0, 20), st.sampled_from([torch.float32, torch.bfloat16])), max_size=12)


def make(sizes) -> list[tuple[str, torch.Tensor]]:
    return [(str(number), torch.rand(size).to(dtype)) for number, (size, dtype) in enumerate(sizes)]


@given(SIZES, st.integers(1, 100))
def test_buckets_are_bounded_of_one_dtype_and_together_the_whole(sizes, max_bytes):
    tensors = make(sizes)
    found = list(buckets(tensors, max_bytes))
    for dtype in (torch.float32, torch.bfloat16):
        together = [name for bucket, _ in found for name, tensor in bucket if tensor.dtype is dtype]
        assert together == [name for name, tensor in tensors if tensor.dtype is dtype]
    assert [last for _, last in found] == [False] * (len(found) - 1) + [True]
    for bucket, _ in found:
        assert sum(tensor.nbytes for _, tensor in bucket) <= max_bytes or len(bucket) == 1
        assert len({tensor.dtype for _, tensor in bucket}) <= 1


def test_a_bucket_laid_out_gives_every_tensor_back():
    tensors = make([(6, torch.float32), (0, torch.float32), (5, torch.float32)])
    flat = torch.empty(44, dtype=torch.uint8)
    layout = lay_out(tensors, flat)
    for (name, tensor), place in zip(tensors, layout, strict=True):
        part = flat[place.start_idx : place.end_idx].view(place.dtype).view(place.shape)
        assert (place.name, place.numel) == (name, tensor.nbytes)
        assert torch.equal(part, tensor)
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_one_piece_of_shared_memory_takes_bucket_after_bucket():
    transport, cpu = TensorTransport(100), torch.device("cpu")
    first = transport._room(44, cpu)
    assert first.is_shared() and len(first) == 44
    second = transport._room(20, cpu)
    assert len(second) == 20 and second.data_ptr() == first.data_ptr()
    assert len(transport._room(60, cpu)) == 60
