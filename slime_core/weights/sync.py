"""Send the trainer's weights to every engine: pause, flush, transport, verify, go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from slime_core.engines.admin import EngineAdmin
from slime_core.errors import EngineError, WeightSyncError
from slime_core.options import Options
from slime_core.weights.checksum import compare
from slime_core.weights.disk import DiskTransport


class WeightSync:
    """Lives beside the trainer rank that exports the weights."""

    def __init__(self, args: Options, worker_urls: Sequence[str], run_dir: Path) -> None:
        self._args = args
        self._urls = list(worker_urls)
        self._transport = DiskTransport(args.weights_dir, run_dir / "weights")

    async def send(self, export: Callable[[Path], dict[str, str]], version: int) -> dict[str, float]:
        """Give every engine the weights as `version`.

        Args:
            export: writes the weights to a directory and returns tensor name -> checksum.

        Returns:
            `perf/weights_s`, and `perf/engines_paused_s`, the part in which the engines stood still.

        Raises:
            WeightSyncError: when an engine refuses the weights, or uses others than were sent.
        """
        if not self._urls:
            return {}
        started = time.monotonic()
        async with EngineAdmin(self._urls, self._args.request_timeout_s) as admin:
            try:
                await admin.pause(self._args.pause_mode)
                paused = time.monotonic()
                try:
                    await self._send_paused(admin, export, version)
                finally:
                    await admin.resume()  # with the new weights or, after a refusal, the old ones
            except EngineError as error:
                raise WeightSyncError(f"the weights of version {version} were not taken: {error}") from None
        done = time.monotonic()
        return {"perf/weights_s": done - started, "perf/engines_paused_s": done - paused}

    async def _send_paused(self, admin: EngineAdmin, export: Callable[[Path], dict[str, str]], version: int) -> None:
        if self._args.pause_mode != "in_place":
            await admin.flush_cache()
        sent = await self._transport.send(admin, export, version)
        for url, used in (await admin.checksums()).items():
            compare(sent, used, url)
