"""One way for weights to reach engines; `--weight-transport` names it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from slime_core.engines.admin import EngineAdmin
from slime_core.options import Options
from slime_core.weights.broadcast import BroadcastTransport
from slime_core.weights.disk import DiskTransport
from slime_core.weights.source import Update
from slime_core.weights.tensor import TensorTransport

MEGABYTE = 1 << 20


class Transport(Protocol):
    """What every transport does."""

    def offer(self, admin: EngineAdmin, update: Update) -> AbstractAsyncContextManager[Callable[[], Awaitable[None]]]:
        """Prepare an update while the engines go on; the function it gives is called once they are paused.

        When that function returns, every engine uses the weights under the update's version.

        Raises:
            EngineError, WeightSyncError: when an engine refuses them or is gone.
        """

    def forget_engines(self) -> None:
        """Some engine is a new process: whatever was set up with the old ones is void."""

    def close(self) -> None:
        """Leave nothing behind."""


def open_transport(args: Options, run_dir: Path) -> Transport:
    """The transport that `--weight-transport` names."""
    bucket_bytes = args.weight_bucket_mb * MEGABYTE
    if args.weight_transport == "broadcast":
        colocated, external = args.placement == "colocated", bool(args.external_engines)
        return BroadcastTransport(bucket_bytes, args.request_timeout_s, colocated=colocated, external=external)
    if args.weight_transport == "tensor":
        return TensorTransport(bucket_bytes)
    return DiskTransport(args.weights_dir, run_dir / "weights")
