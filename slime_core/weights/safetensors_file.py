"""A safetensors file that is written again and again, in place: the kernel takes longest over new memory."""

from __future__ import annotations

import json
import mmap
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


class SafetensorsFile:
    """Keeps the file mapped between two writes, so that a write costs one copy."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mapped: torch.Tensor | None = None

    def write(self, tensors: Sequence[tuple[str, torch.Tensor]], metadata: Mapping[str, str]) -> None:
        """Contiguous tensors of any device, and a header of strings, instead of what is there.

        Raises:
            OSError: when they do not fit.
        """
        header = torch.frombuffer(_header(tensors, metadata), dtype=torch.uint8)
        contents = [header, *(tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in tensors)]
        sizes = [len(content) for content in contents]
        for part, content in zip(torch.split(self._room(sum(sizes)), sizes), contents, strict=True):
            part.copy_(content)

    def close(self) -> None:
        """Let go of the memory; the file stays."""
        self._mapped = None

    def _room(self, size: int) -> torch.Tensor:
        """The file's [size] bytes."""
        if self._mapped is None or len(self._mapped) != size:
            self._mapped = None
            self._path.unlink(missing_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                # a full disk is an error here; found out while writing to mapped memory, it would end the process
                os.posix_fallocate(descriptor, 0, size)
                self._mapped = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
            finally:
                os.close(descriptor)
        return self._mapped


def _header(tensors: Sequence[tuple[str, torch.Tensor]], metadata: Mapping[str, str]) -> bytearray:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    place = 0
    for name, tensor in tensors:
        span = [place, place + tensor.nbytes]
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        place = span[1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return bytearray(len(text).to_bytes(8, "little") + text)
