"""Send the trainer's weights to every engine: pause, flush, transport, verify, go on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from slime_core.engines.admin import EngineAdmin
from slime_core.errors import EngineError, WeightSyncError
from slime_core.options import Options
from slime_core.types import FloatArray
from slime_core.weights import parity
from slime_core.weights.checksum import compare
from slime_core.weights.disk import DiskTransport
from slime_core.weights.fusion import comparable, fused_checksums

WEIGHTS_FILE = "model.safetensors"


class WeightSource(Protocol):
    """What has the weights: the trainer's rank 0."""

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""

    @property
    def dtype(self) -> str:
        """Of the weights, for example `float32`."""

    def export_weights(self, directory: Path) -> dict[str, str]:
        """Write `directory/model.safetensors` under Hugging Face names; returns tensor name -> checksum."""

    def prompt_logprobs(self, tokens: Sequence[int]) -> FloatArray:
        """Log-probabilities, at temperature 1, of every token of a prompt but the first."""


class WeightSync:
    """Lives beside the trainer rank that exports the weights."""

    def __init__(self, args: Options, run_dir: Path) -> None:
        self._args = args
        self._num_sent = 0
        self._compared: set[str] = set()
        self._transport = DiskTransport(args.weights_dir, run_dir / "weights")

    async def send(self, source: WeightSource, version: int, worker_urls: Sequence[str]) -> dict[str, float]:
        """Give these engines the weights as `version`, and compare what they compute with the trainer now and then.

        Returns:
            `perf/weights_s`, `perf/engines_paused_s`, the part in which the engines stood still, and
            `weights/logprob_abs_diff` where a prompt was compared.

        Raises:
            WeightSyncError: when an engine refuses the weights, uses others than were sent, or computes other numbers.
        """
        if not worker_urls:
            return {}
        started = time.monotonic()
        async with EngineAdmin(worker_urls, self._args.request_timeout_s) as admin:
            try:
                await admin.pause(self._args.pause_mode)
                paused = time.monotonic()
                try:
                    await self._send_paused(admin, source, version)
                finally:
                    await admin.resume()  # with the new weights or, after a refusal, the old ones
                resumed = time.monotonic()
                compared = await self._compare(admin, source, version, worker_urls)
            except EngineError as error:
                raise WeightSyncError(f"the weights of version {version} were not taken: {error}") from None
        done = time.monotonic()
        return {"perf/weights_s": done - started, "perf/engines_paused_s": resumed - paused} | compared

    async def _send_paused(self, admin: EngineAdmin, source: WeightSource, version: int) -> None:
        if self._args.pause_mode != "in_place":
            await admin.flush_cache()
        if self._args.engine == "embedded":
            sent = await self._transport.send(admin, source.export_weights, version)
            for url, used in (await admin.checksums()).items():
                compare(sent, used, url)
            return
        # SGLang hashes fused parameters, and on a GPU with a kernel of its own: there the parity probe has to do.
        infos = await admin.server_infos()
        hashable = all(info["device"] == "cpu" and info["tp_size"] == 1 for info in infos.values())

        def export(directory: Path) -> dict[str, str]:
            source.export_weights(directory)
            return fused_checksums(directory / WEIGHTS_FILE) if hashable else {}

        sent = await self._transport.send(admin, export, version)
        for url, used in (await admin.checksums()).items() if hashable else ():
            compare(comparable(sent, used), used, url)

    async def _compare(
        self, admin: EngineAdmin, source: WeightSource, version: int, worker_urls: Sequence[str]
    ) -> dict[str, float]:
        """The parity probe, after an engine's first update and every --weights-check-interval ones."""
        self._num_sent += 1
        due = (self._num_sent - 1) % self._args.weights_check_interval == 0
        if not due and self._compared.issuperset(worker_urls):
            return {}
        self._compared = {*self._compared, *worker_urls}
        tokens = parity.probe_tokens(source.vocab_size, self._args.seed)
        given = await admin.prompt_logprobs(tokens)
        limit = parity.bound(self._args, source.dtype)
        return {"weights/logprob_abs_diff": parity.check(source.prompt_logprobs(tokens), given, limit, version)}
