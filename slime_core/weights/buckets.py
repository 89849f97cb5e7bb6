"""Cut a model's tensors into pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from slime_core.weights.source import NamedTensors

Bucket = list[tuple[str, torch.Tensor]]


def buckets(tensors: NamedTensors, max_bytes: int) -> Iterator[tuple[Bucket, bool]]:
    """Neighbours together, at most `max_bytes` each, and whether it is the last; a larger tensor is alone in its own.

    All tensors of a bucket have one dtype: SGLang takes no tensor that starts at an odd byte.
    """
    bucket: Bucket = []
    size = 0
    for name, tensor in tensors:
        if bucket and (size + tensor.nbytes > max_bytes or tensor.dtype != bucket[0][1].dtype):
            yield bucket, False
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    yield bucket, True


def dtype_name(tensor: torch.Tensor) -> str:
    """As the engines' protocol writes it, for example `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")
