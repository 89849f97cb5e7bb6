"""Weights by tensor: engines on the trainer's machine open its memory, shared files on CPU and IPC handles on a GPU.

SGLang's protocol takes pickles here: this process writes them, and the engines' own restricted loader reads them.
"""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing

from slime_core.engines.admin import EngineAdmin
from slime_core.errors import EngineError, WeightSyncError
from slime_core.weights.buckets import Bucket, buckets, refuse_copies_and_stages
from slime_core.weights.source import Update

REBUILT_DEVICE = 6
"""Place of the device among the arguments of torch's rebuild_cuda_tensor."""


class TensorTransport:
    """Buckets laid end to end in memory that the engines open."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._shared = torch.empty(0, dtype=torch.uint8)
        """Memory that one bucket after the other is laid into: the kernel takes longest over new memory."""

    @asynccontextmanager
    async def offer(self, admin: EngineAdmin, update: Update) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Nothing to prepare: the weights are where they are."""
        yield partial(self._deliver, admin, update)

    def forget_engines(self) -> None:
        """Memory knows no engines."""

    def close(self) -> None:
        """Shared memory goes with the last tensor in it."""
        self._shared = torch.empty(0, dtype=torch.uint8)

    def _room(self, size: int, device: torch.device) -> torch.Tensor:
        """[size] bytes there, shared if on CPU; the engines have copied what lay in them before."""
        if device.type == "cuda":  # new memory costs nothing there
            return torch.empty(size, dtype=torch.uint8, device=device)
        if len(self._shared) < size:
            self._shared = _by_file(torch.empty(size, dtype=torch.uint8).share_memory_)
        return self._shared[:size]

    async def _deliver(self, admin: EngineAdmin, update: Update) -> None:
        infos = await admin.server_infos()
        refuse_copies_and_stages(infos)
        try:
            async with admin.weight_update():
                for bucket, last in buckets(update.tensors(), self._bucket_bytes):
                    size = sum(tensor.nbytes for _, tensor in bucket)
                    flat = self._room(size, bucket[0][1].device)
                    layout = lay_out(bucket, flat)
                    # an IPC handle is counted by its reader: every rank needs one of its own
                    bodies = {
                        url: {
                            "serialized_named_tensors": [serialized(flat, layout) for _ in range(info["tp_size"])],
                            "load_format": "flattened_bucket",
                            "flush_cache": False,
                            "weight_version": str(update.version) if last else None,
                        }
                        for url, info in infos.items()
                    }
                    await admin.update_weights_from_tensor(bodies)
        except EngineError as error:
            raise WeightSyncError(
                f"the weights of version {update.version} were not taken: {error} SGLang may hold a part of them and "
                "must not generate before a whole update."
            ) from None


def lay_out(bucket: Bucket, flat: torch.Tensor) -> list[SimpleNamespace]:
    """Copy the tensors' bytes into `flat` [num_bytes]; where each lies then, as SGLang wants it told."""
    sizes = [tensor.nbytes for _, tensor in bucket]
    layout, start = [], 0
    for (name, tensor), part, size in zip(bucket, torch.split(flat, sizes), sizes, strict=True):
        part.copy_(tensor.reshape(-1).view(torch.uint8))
        layout.append(
            SimpleNamespace(
                name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=start + size, numel=size
            )
        )
        start += size
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)
    return layout


def serialized(flat: torch.Tensor, layout: list[SimpleNamespace]) -> str:
    """A handle of the memory and its layout, pickled, in base64."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    _by_file(lambda: pickler.dump({"flattened_tensor": flat, "metadata": layout}))
    return base64.b64encode(buffer.getvalue()).decode()


class _Pickler(ForkingPickler):
    """Torch's own, but a GPU is named by its UUID: another process may count the devices otherwise."""

    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = torch.multiprocessing.reductions.reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(arguments[REBUILT_DEVICE]).uuid)
        return rebuild, (*arguments[:REBUILT_DEVICE], uuid, *arguments[REBUILT_DEVICE + 1 :])


def _by_file(act: Callable[[], Any]) -> Any:
    """Share memory by files, which any program can open; torch's default passes descriptors to children only."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        return act()
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
