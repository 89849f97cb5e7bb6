"""A safetensors file as tensors that are views of it; one that is rewritten in place stays mapped between updates."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path

import torch
from safetensors import safe_open

LENGTH_BYTES = 8
Key = tuple[str, int, int, int]


class MappedFile:
    """Remembers the file it read last: mapping anew costs as much as copying a model."""

    def __init__(self) -> None:
        self._last: Key | None = None
        self._kept: torch.Tensor | None = None

    def read(self, file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """The tensors by name, and the header's strings.

        Raises:
            OSError, SafetensorError, ValueError, RuntimeError: when the file is not whole.
        """
        with safe_open(file, framework="pt", device="cpu") as opened:
            metadata: dict[str, str] = opened.metadata() or {}
            # its views tell dtype and shape, and touch no page of the data
            like = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        content = self._content(file)
        length = int.from_bytes(bytes(content[:LENGTH_BYTES].tolist()), "little")
        start = LENGTH_BYTES + length
        header = json.loads(content[LENGTH_BYTES:start].numpy().tobytes())
        tensors = {}
        for name, view in like.items():
            begin, end = (start + offset for offset in header[name]["data_offsets"])
            part = content[begin:end]
            if begin % view.element_size():
                part = part.clone()
            tensors[name] = part.view(view.dtype).view(view.shape)
        return tensors, metadata

    def _content(self, file: Path) -> torch.Tensor:
        """The file's bytes, [size]; a file seen twice at one place is kept, so that no removed one takes memory."""
        with open(file, "rb") as opened:
            stat = os.fstat(opened.fileno())
            key = (str(file), stat.st_dev, stat.st_ino, stat.st_size)
            if key == self._last and self._kept is not None:
                return self._kept
            content = torch.frombuffer(mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE), dtype=torch.uint8)
        self._kept = content if key == self._last else None
        self._last = key
        return content
