"""A torch.distributed group of the trainer (rank 0) and the engines' ranks, over which weights are broadcast.

The process's default group, if it has one, is left alone. The keys in the store are those that SGLang's own helper
uses, so that a stock server can be a member.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import PrefixStore, TCPStore, distributed_c10d

T = TypeVar("T")
SENDER = 0
JOIN_TIMEOUT = timedelta(seconds=60)
DEVICES = {"gloo": "cpu", "nccl": "cuda"}
"""Backend -> the kind of device whose tensors it moves."""


class WeightGroup:
    """One member; every member must make the same broadcasts in the same order."""

    def __init__(self, store: TCPStore, name: str, rank: int, size: int, backend: str, timeout_s: float) -> None:
        """Wait for the others; over NCCL the first broadcast does.

        Raises:
            RuntimeError: when they do not all come within a minute.
        """
        self._store = store  # rank 0's holds the meeting point, and must live as long as the group
        self._timeout = timedelta(seconds=timeout_s)
        prefixed = PrefixStore(f"{DEVICES[backend]}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        if backend == "nccl":
            options = distributed_c10d.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._group: Any = distributed_c10d.ProcessGroupNCCL(prefixed, rank, size, options)
        else:
            self._group = distributed_c10d.ProcessGroupGloo(prefixed, rank, size, JOIN_TIMEOUT)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send (rank 0) or fill (the others) contiguous tensors, all under way at once.

        Raises:
            RuntimeError: when a member is gone or takes longer than the group's timeout.
        """
        problem = self._broadcast(tensors)
        if problem:
            raise RuntimeError(problem)
        if tensors and tensors[0].is_cuda:
            torch.cuda.synchronize(tensors[0].device)  # NCCL's wait() is one of the stream, not of this thread

    def _broadcast(self, tensors: Sequence[torch.Tensor]) -> str:
        """What went wrong, in words: an exception would keep the connections open, which its frames refer to."""
        try:
            for work in [self._group.broadcast(tensor, SENDER, self._timeout) for tensor in tensors]:
                work.wait()
        except RuntimeError as error:
            return str(error) or type(error).__name__
        return ""

    def leave(self) -> None:
        """Close the connections; broadcasts under way fail, here and at the other members."""
        self._group.abort()
        self._group = None


def nccl_version() -> tuple[int, ...] | None:
    """Of this torch; None where it is built for CPUs."""
    return torch.cuda.nccl.version() if torch.backends.cuda.is_built() else None


def meeting_point(address: str, num_members: int) -> TCPStore:
    """The store where members meet, on a free port (`port`) of this address alone; made by rank 0."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        num_members,
        is_master=True,
        timeout=JOIN_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # it is the store's to close now
    )


def meet_at(address: str, port: int, num_members: int) -> TCPStore:
    """Connect to another member's store."""
    return TCPStore(address, port, num_members, is_master=False, timeout=JOIN_TIMEOUT, wait_for_workers=False)


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Await a function that may block for ever in C++; a process that ends does not wait for its thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is None:
            future.set_result(value)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def run() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (function(), None)
        except BaseException as error:
            outcome = (None, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="weight-group", daemon=True).start()
    return await future
