"""Cut a model's tensors into pieces of bounded size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from slime_core.errors import WeightSyncError
from slime_core.weights.source import NamedTensors

Bucket = list[tuple[str, torch.Tensor]]


def buckets(tensors: NamedTensors, max_bytes: int) -> Iterator[tuple[Bucket, bool]]:
    """Tensors together, at most `max_bytes`, and whether it is the last bucket; a larger tensor is alone in its own.

    All tensors of a bucket have one dtype: SGLang takes no tensor that starts at an odd byte. Those of a dtype keep
    their order.
    """
    opened: dict[torch.dtype, Bucket] = {}
    sizes: Counter[torch.dtype] = Counter()
    for name, tensor in tensors:
        bucket = opened.setdefault(tensor.dtype, [])
        if bucket and sizes[tensor.dtype] + tensor.nbytes > max_bytes:
            yield bucket, False
            bucket = opened[tensor.dtype] = []
            sizes[tensor.dtype] = 0
        bucket.append((name, tensor))
        sizes[tensor.dtype] += tensor.nbytes
    *others, last = opened.values() or [[]]
    for bucket in others:
        yield bucket, False
    yield last, True


def refuse_copies_and_stages(infos: Mapping[str, Mapping[str, Any]]) -> None:
    """SGLang takes weights in parts only where every rank has a slice of the whole model.

    Args:
        infos: URL -> what the server says of itself.

    Raises:
        WeightSyncError: for a server with pipeline or data parallelism.
    """
    for url, info in infos.items():
        # an older SGLang tells the size of data-parallel attention, which has no copies, by the name of theirs
        copies = 1 if info.get("enable_dp_attention") else info["dp_size"]
        if info["pp_size"] > 1 or copies > 1:
            raise WeightSyncError(
                f"{url} runs with pipeline or data parallelism, for which SGLang takes weights from files only; use "
                "--weight-transport disk."
            )


def dtype_name(tensor: torch.Tensor) -> str:
    """As the engines' protocol writes it, for example `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")
