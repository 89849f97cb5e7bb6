"""Send the trainer's weights to every engine: prepare, pause, flush, deliver, verify, go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from slime_core.engines.admin import EngineAdmin
from slime_core.engines.checksum import model_checksums
from slime_core.engines.sglang import version_number
from slime_core.errors import EngineError, WeightSyncError
from slime_core.options import Options
from slime_core.weights import parity
from slime_core.weights.checksum import compare
from slime_core.weights.fp8 import read_fp8
from slime_core.weights.fusion import comparable, fused_checksums
from slime_core.weights.offload import REST, WEIGHTS, Offload
from slime_core.weights.source import NamedTensors, Update, WeightSource, engine_dtype
from slime_core.weights.transport import open_transport

HASHING_VERSION = (0, 5, 23)
"""SGLang's first that tells the checksums of its weights."""


Comparable = Callable[[Mapping[str, str], Mapping[str, str]], tuple[Mapping[str, str], Mapping[str, str]]]
"""(checksums sent, checksums used) -> those of each that have a counterpart."""


class WeightSync:
    """Lives beside the trainer rank that has the weights."""

    def __init__(self, args: Options, worker_urls: Sequence[str], run_dir: Path) -> None:
        self._args = args
        self._urls = list(worker_urls)
        self._num_sent = 0
        self._num_bytes = 0
        """Of the weights as they were last read."""
        self._unchecked = False
        """Whether an engine has joined since the last comparison."""
        self._in_stages = False
        """Whether an engine answers for its first pipeline stage alone: then every update is compared."""
        self._offload = Offload()
        self._fp8 = None if args.rollout_model is None else read_fp8(args.rollout_model)
        self.transport = open_transport(args, run_dir)

    def set_engines(self, worker_urls: Sequence[str]) -> None:
        """Send to these from now on."""
        if set(worker_urls) != set(self._urls):
            self._unchecked = self._unchecked or not set(worker_urls) <= set(self._urls)
            self._urls = list(worker_urls)
            self.transport.forget_engines()
            self._offload.keep_only(worker_urls)

    async def release(self) -> None:
        """Let the engines free their GPU memory; the next update takes it back.

        Raises:
            EngineError: when one cannot, or is gone.
        """
        async with EngineAdmin(self._urls, self._args.request_timeout_s) as admin:
            await self._offload.release(admin)

    def close(self) -> None:
        """Leave no files and no connections behind."""
        self.transport.close()

    async def send(
        self, source: WeightSource, version: int, worker_urls: Sequence[str] | None = None
    ) -> dict[str, float]:
        """Give the engines the weights as `version`, and compare what they compute with the trainer now and then.

        Args:
            worker_urls: those that need them, such as one that was restarted; None for all.

        Returns:
            `perf/weights_s`, `perf/engines_paused_s`, the part in which the engines stood still, `weights/bytes`, what
            each engine got, and `weights/logprob_abs_diff` where a prompt was compared.

        Raises:
            WeightSyncError: when an engine refuses the weights, uses others than were sent, or computes other numbers.
        """
        urls = self._urls if worker_urls is None else list(worker_urls)
        if not urls:
            return {}
        started = time.monotonic()
        # a new engine is always checked
        due = worker_urls is not None or self._unchecked or self._in_stages
        due = due or self._num_sent % self._args.weights_check_interval == 0
        async with EngineAdmin(urls, self._args.request_timeout_s) as admin:
            try:
                self._make_room(source)
                await self._offload.take_back(admin, WEIGHTS)
                infos = await admin.server_infos() if due and self._args.engine == "sglang" else {}
                self._in_stages = self._in_stages or any(map(answers_for_one_stage, infos.values()))
                hashed = due and all(map(hashes_as_we_do, infos.values()))
                paused_s = await self._send(admin, source, version, hashed)
                compared = await self._compare(admin, source, version) if due else {}
            except EngineError as error:
                raise WeightSyncError(f"the weights of version {version} were not taken: {error}") from None
        if worker_urls is None:
            self._num_sent, self._unchecked = self._num_sent + 1, False
        metrics = {"perf/weights_s": time.monotonic() - started, "perf/engines_paused_s": paused_s}
        return metrics | {"weights/bytes": float(self._num_bytes)} | compared

    async def _send(self, admin: EngineAdmin, source: WeightSource, version: int, hashed: bool) -> float:
        """The seconds in which the engines stood still."""
        tensors = partial(self._tensors, source)
        sent, comparing = self._expected(tensors, hashed)
        own = sent if self._args.engine == "embedded" else {}
        async with self.transport.offer(admin, Update(version, tensors, own)) as deliver:
            await admin.pause(self._args.pause_mode)
            paused = time.monotonic()
            try:
                if self._args.pause_mode != "in_place":
                    await admin.flush_cache()
                await deliver()
                if sent:
                    for engine, used in (await admin.checksums()).items():
                        compare(*comparing(sent, used), engine)
                self._make_room(source)
            except BaseException:
                # with the old weights; one that hangs over the new ones must not hold up the others
                with suppress(EngineError, TimeoutError):
                    async with asyncio.timeout(self._args.engine_health_timeout_s):
                        await self._go_on(admin)
                raise
            await self._go_on(admin)
            return time.monotonic() - paused

    def _make_room(self, source: WeightSource) -> None:
        """An engine that cannot have its memory again ends; what a trainer has used it keeps, unless it is told."""
        if self._args.offload_engines:
            source.free_cache()

    async def _go_on(self, admin: EngineAdmin) -> None:
        try:
            await self._offload.take_back(admin, REST)
        finally:
            await admin.resume()

    def _tensors(self, source: WeightSource) -> NamedTensors:
        """As the engines hold them."""
        tensors = source.weights(engine_dtype(self._args) or source.dtype)
        return self._counted(tensors if self._fp8 is None else self._fp8.cast(tensors))

    def _counted(self, tensors: NamedTensors) -> NamedTensors:
        total = 0
        for name, tensor in tensors:
            total += tensor.nbytes
            yield name, tensor
        self._num_bytes = total

    def _expected(self, tensors: Callable[[], NamedTensors], hashed: bool) -> tuple[dict[str, str], Comparable]:
        """The checksums that the engines must have, empty where they are not asked, and what of them to compare."""
        if self._args.engine == "embedded":
            return model_checksums(tensors()), lambda sent, used: (sent, used)
        known = engine_dtype(self._args) is not None and self._fp8 is None
        return fused_checksums(tensors()) if hashed and known else {}, comparable

    async def _compare(self, admin: EngineAdmin, source: WeightSource, version: int) -> dict[str, float]:
        """The parity probe; nothing where no engine reads prompts."""
        tokens = parity.probe_tokens(source.vocab_size, self._args.seed)
        given = await admin.prompt_logprobs(tokens)
        if not given:
            return {}
        limit = parity.bound(self._args, source.dtype, quantised=self._fp8 is not None)
        return {"weights/logprob_abs_diff": parity.check(source.prompt_logprobs(tokens), given, limit, version)}


def hashes_as_we_do(info: Mapping[str, Any]) -> bool:
    """Whether a server tells checksums that are ours: SGLang hashes on a GPU with a kernel of its own."""
    number = version_number(str(info["version"]))
    return number >= HASHING_VERSION and info["device"] == "cpu" and info["tp_size"] == info["pp_size"] == 1


def answers_for_one_stage(info: Mapping[str, Any]) -> bool:
    """Whether a server takes weights for granted that only its first pipeline stage has: the others tell it nothing."""
    return int(info["pp_size"]) > 1
