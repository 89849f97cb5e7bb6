"""The data-parallel ranks of a run: sums and small messages between them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

BUCKET = 2**25
"""Numbers summed by one all-reduce."""


class DataParallel(Protocol):
    """The ranks that share a round's samples, as one of them sees them."""

    @property
    def rank(self) -> int:
        """Of this process."""

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""

    def sum_(self, flat: torch.Tensor) -> torch.Tensor:
        """Sum a flat tensor over them, in place."""

    def gather(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The JSON-able message of each, in one order, on every rank."""


@dataclass(frozen=True)
class Ranks:
    """This process among the trainer ranks; a single one needs no process group."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls, rank: int, size: int, *, address: str, port: int, device: torch.device) -> Ranks:
        """Meet the other ranks at the address of rank 0: gloo on CPU, NCCL on CUDA."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if size > 1:
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=size)
        return cls(rank, size, device)

    def sum_(self, flat: torch.Tensor) -> torch.Tensor:
        """Sum a flat tensor over the ranks, in place, bucket by bucket."""
        if self.size > 1:
            for bucket in flat.split(BUCKET):
                dist.all_reduce(bucket)
        return flat

    def gather(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's JSON-able message, in rank order, on every rank."""
        if self.size == 1:
            return [message]
        text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8).to(self.device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(text)], device=self.device))
        padded = text.new_zeros(int(max(size.item() for size in sizes)))
        padded[: len(text)] = text
        texts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(texts, padded)
        raw = [bytes(t[: int(size.item())].tolist()) for t, size in zip(texts, sizes, strict=True)]
        return [json.loads(part) for part in raw]

    def leave(self) -> None:
        """Close the process group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
