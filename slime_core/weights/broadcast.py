"""Weights by broadcast: a torch.distributed group of the trainer and all engines' ranks, gloo on CPU, NCCL on GPUs."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from slime_core.engines.admin import EngineAdmin
from slime_core.engines.process import LOOPBACK
from slime_core.engines.weight_group import DEVICES, WeightGroup, in_daemon_thread, meeting_point
from slime_core.errors import EngineError, WeightSyncError
from slime_core.weights.buckets import Bucket, buckets, dtype_name, refuse_copies_and_stages
from slime_core.weights.source import NamedTensors, Update

CLOSE_TIMEOUT_S = 5.0
EVERYWHERE = "0.0.0.0"


class BroadcastTransport:
    """The group is made with the first update and lives until the engines change."""

    def __init__(self, bucket_bytes: int, timeout_s: float, *, colocated: bool, external: bool) -> None:
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._colocated, self._external = colocated, external
        self._group: WeightGroup | None = None
        self._name = self._backend = ""
        self._members: list[str] = []
        self._group_of: dict[str, str] = {}
        """URL -> the group that this engine was last let into, though the trainer may have left it."""

    @asynccontextmanager
    async def offer(self, admin: EngineAdmin, update: Update) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Meet the engines, unless the group stands; then broadcast, bucket by bucket."""
        if self._group is None or self._members != admin.urls:
            await self._leave(admin)
            self._group = await self._meet(admin, update.tensors())
        yield partial(self._deliver, admin, self._group, update)

    def forget_engines(self) -> None:
        """The next update makes a new group; engines that still live are told to leave the old one then."""
        group, self._group = self._group, None
        if group is not None:
            group.leave()

    def close(self) -> None:
        """Leave the group; engines that outlive the run leave it too."""
        self.forget_engines()
        if self._external:
            asyncio.run(self._leave_all())

    async def _leave_all(self) -> None:
        async with EngineAdmin(list(self._group_of), CLOSE_TIMEOUT_S) as admin:
            await self._leave(admin)

    # --- the group ----------------------------------------------------------------------------------------------------
    async def _meet(self, admin: EngineAdmin, tensors: NamedTensors) -> WeightGroup:
        infos = await admin.server_infos()
        offsets, size = rank_offsets(infos)
        on_gpu = next((tensor.is_cuda for _, tensor in tensors), False)
        backend = self._backend = choose_backend(on_gpu, infos, colocated=self._colocated)
        name = self._name = f"slime-{uuid.uuid4().hex}"
        seen = {url: address_seen_by(url) for url in admin.urls}
        address = common_address(seen.values())
        store = meeting_point(address, size)
        self._members = list(admin.urls)
        self._group_of |= dict.fromkeys(admin.urls, name)
        bodies = {
            url: {
                "master_address": seen[url] if address == EVERYWHERE else address,
                "master_port": store.port,
                "rank_offset": offset,
                "world_size": size,
                "group_name": name,
                "backend": backend,
            }
            for url, offset in offsets.items()
        }
        meet = partial(WeightGroup, store, name, 0, size, backend, self._timeout_s)
        try:
            group, _ = await _both(in_daemon_thread(meet), admin.init_weights_update_group(bodies))
        except RuntimeError as error:
            raise WeightSyncError(
                f"trainer and engines could not form a {backend} group for --weight-transport broadcast: {error} Where "
                "they are on several machines, GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names the network to use."
            ) from None
        return group

    async def _leave(self, admin: EngineAdmin) -> None:
        """Take down the groups that these engines are in."""
        self.forget_engines()
        for url in admin.urls:
            if (name := self._group_of.pop(url, None)) is not None:
                await admin.destroy_weights_update_group([url], name)
        self._members = []

    # --- an update ----------------------------------------------------------------------------------------------------
    async def _deliver(self, admin: EngineAdmin, group: WeightGroup, update: Update) -> None:
        device = DEVICES[self._backend]
        try:
            async with admin.weight_update(), self._left_on_failure():
                for bucket, last in buckets(update.tensors(), self._bucket_bytes):
                    moved = [(name, tensor.to(device)) for name, tensor in bucket]
                    body = described(moved, self._name, str(update.version) if last else None)
                    send = in_daemon_thread(partial(group.broadcast, [tensor for _, tensor in moved]))
                    await _both(send, admin.update_weights_from_distributed(body))
        except (EngineError, RuntimeError) as error:
            raise WeightSyncError(
                f"the weights of version {update.version} were not taken: {error} SGLang may hold a part of them and "
                "must not generate before a whole update."
            ) from None

    @asynccontextmanager
    async def _left_on_failure(self) -> AsyncIterator[None]:
        """Leave a group whose members are out of step, at once: those that still wait in it answer nothing else."""
        try:
            yield
        except BaseException:
            self.forget_engines()
            raise


def described(bucket: Bucket, group: str, version: str | None) -> dict[str, Any]:
    """What the engines are told about a bucket."""
    return {
        "names": [name for name, _ in bucket],
        "dtypes": [dtype_name(tensor) for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
        "group_name": group,
        "flush_cache": False,
        "weight_version": version,
    }


def rank_offsets(infos: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, int], int]:
    """URL -> rank of its first worker in the group, and the group's size; rank 0 is the trainer's.

    Raises:
        WeightSyncError: for a server whose workers SGLang cannot number.
    """
    refuse_copies_and_stages(infos)
    offsets, next_rank = {}, 1
    for url, info in infos.items():
        offsets[url] = next_rank
        next_rank += info["tp_size"]
    return offsets, next_rank


def choose_backend(on_gpu: bool, infos: Mapping[str, Mapping[str, Any]], *, colocated: bool) -> str:
    """NCCL where trainer and engines have GPUs of their own, else gloo.

    Raises:
        WeightSyncError: when NCCL would have to connect a GPU with itself.
    """
    devices = {info["device"] for info in infos.values()}
    if not on_gpu or devices != {"cuda"}:
        return "gloo" if devices == {"cpu"} else _no_backend(devices)
    if colocated:
        raise WeightSyncError(
            "trainer and engines share GPUs, and NCCL does not connect a GPU with itself: use --weight-transport "
            "tensor, or --placement disaggregated."
        )
    return "nccl"


def _no_backend(devices: set[Any]) -> str:
    raise WeightSyncError(
        f"the trainer's weights cannot be broadcast to engines on {' and '.join(sorted(map(str, devices)))}; use "
        "--weight-transport disk."
    )


def common_address(addresses: Iterable[str]) -> str:
    """One of this machine's addresses that all servers reach, given what each sees; where none does, `EVERYWHERE`."""
    outside = {address for address in addresses if not address.startswith("127.")}
    if len(outside) > 1:
        return EVERYWHERE
    return outside.pop() if outside else LOOPBACK


def address_seen_by(url: str) -> str:
    """The address of this machine on the way to a server."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))  # sends nothing: it asks the kernel for the route
        address: str = probe.getsockname()[0]
    return address


async def _both(sending: Awaitable[Any], asking: Awaitable[Any]) -> tuple[Any, Any]:
    """Results of both; the first failure at once, whatever the other does."""
    tasks = [asyncio.ensure_future(sending), asyncio.ensure_future(asking)]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
