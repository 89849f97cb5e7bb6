"""Write safetensors in one pass, over what is there: pages that a file has already cost a third of new ones."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The format's names: https://github.com/huggingface/safetensors, "Format"."""
ALIGNMENT = 8


def write_safetensors(path: Path, tensors: Sequence[tuple[str, torch.Tensor]], metadata: Mapping[str, str]) -> None:
    """Write or overwrite a file with contiguous tensors and a header of strings.

    Raises:
        OSError: when they do not fit.
    """
    header = _header(tensors, metadata)
    size = len(header) + sum(tensor.nbytes for _, tensor in tensors)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    with open(descriptor, "r+b", buffering=0) as file:
        file.truncate(size)
        _write_all(file.fileno(), memoryview(header), 0)
        place = len(header)
        for _, tensor in tensors:
            flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
            _write_all(descriptor, flat.numpy().data, place)
            place += len(flat)


def _write_all(descriptor: int, content: memoryview, place: int) -> None:
    while len(content):
        written = os.pwrite(descriptor, content, place)
        content, place = content[written:], place + written


def _header(tensors: Sequence[tuple[str, torch.Tensor]], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    place = 0
    for name, tensor in tensors:
        span = [place, place + tensor.nbytes]
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        place = span[1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
