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
    grouped: bool
    """Whether there is a process group of them."""
    group: dist.ProcessGroup | None = None
    """None: the whole world."""

    @classmethod
    def join(cls, rank: int, size: int, *, address: str, port: int, device: torch.device, group: bool = False) -> Ranks:
        """Meet the other ranks at the address of rank 0: gloo on CPU, NCCL on CUDA.

        Args:
            group: make a process group of a single rank too.
        """
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)  # Ray shows a rank its own GPU alone
        # tensors on the CPU, such as messages, go by gloo
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if size > 1:
            dist.init_process_group(backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=size)
        elif group:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return cls(rank, size, device, size > 1 or group)

    def sum_(self, flat: torch.Tensor) -> torch.Tensor:
        """Sum a flat tensor over the ranks, in place, bucket by bucket."""
        if self.size > 1:
            for bucket in flat.split(BUCKET):
                dist.all_reduce(bucket, group=self.group)
        return flat

    def most(self, count: int) -> int:
        """The largest count of all ranks."""
        largest = torch.tensor([count])
        if self.size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return int(largest.item())

    def gather(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's JSON-able message, in rank order, on every rank."""
        if self.size == 1:
            return [message]
        text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8).to(self.device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(text)], device=self.device), group=self.group)
        padded = text.new_zeros(int(max(size.item() for size in sizes)))
        padded[: len(text)] = text
        texts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(texts, padded, group=self.group)
        raw = [bytes(t[: int(size.item())].tolist()) for t, size in zip(texts, sizes, strict=True)]
        return [json.loads(part) for part in raw]

    def broadcast(self, message: dict[str, Any] | None) -> dict[str, Any]:
        """Rank 0's JSON-able message, on every rank; the others give None."""
        text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        if self.size > 1:
            length = torch.tensor([len(text)])
            dist.broadcast(length, 0)
            text = text if self.rank == 0 else torch.empty(int(length.item()), dtype=torch.uint8)
            dist.broadcast(text, 0)
        sent: dict[str, Any] = json.loads(bytes(text.tolist()))
        return sent

    def leave(self) -> None:
        """Close the process group."""
        if self.grouped and dist.is_initialized():
            dist.destroy_process_group()
