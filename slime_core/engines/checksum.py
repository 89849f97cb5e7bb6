"""Checksums of model weights, the same on the trainer's and on the engine's side.

Both sides hash `model.state_dict()`-style names. The names are Hugging Face's, the bytes are those of the contiguous
tensor in its own dtype, so a bf16 copy of fp32 weights has other checksums.

Tied duplicates: `lm_head.weight` is left out when another tensor of the same shape holds the same bytes (the input
embedding it is tied to). The rule looks at contents, not at storage, so a trainer that gathered two separate copies
and an engine whose two names share memory agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash

OUTPUT_HEAD = "lm_head.weight"


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Return the xxh3-128 hex digest (32 characters) of a tensor's contiguous bytes, for any shape and dtype."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    # numpy knows no bfloat16: hash the raw bytes instead of the numbers
    return xxhash.xxh3_128_hexdigest(flat.view(torch.uint8).numpy().data)


def tensor_checksums(tensors: Iterable[torch.Tensor]) -> list[str]:
    """Checksums of many tensors, in order, on several cores: hashing gives up the interpreter's lock."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(tensor_checksum, tensors))


def model_checksums(
    named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
) -> dict[str, str]:
    """Return {name: checksum} of a model, without the tied duplicate of an output head (see the module's docstring)."""
    tensors = dict(named_tensors)
    checksums = dict(zip(tensors, tensor_checksums(tensors.values()), strict=True))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for head in [name for name in checksums if name == OUTPUT_HEAD or name.endswith("." + OUTPUT_HEAD)]:
        twins = (n for n in checksums if n != head and shapes[n] == shapes[head] and checksums[n] == checksums[head])
        if next(twins, None) is not None:
            del checksums[head]
    return checksums
