"""Weights by disk: the trainer writes safetensors to /dev/shm or a directory, the engines read them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from slime_core.engines.admin import EngineAdmin
from slime_core.errors import WeightSyncError
from slime_core.weights.leftovers import SHARED_MEMORY, own_prefix, remove_stale
from slime_core.weights.safetensors_file import SafetensorsFile
from slime_core.weights.source import Update

FILE = "model.safetensors"


class DiskTransport:
    """A directory that holds one version at a time, until the next: SGLang answers once its first stage has read it.

    In shared memory the file is overwritten by the next version, three times as fast as new memory is; elsewhere every
    version has a directory of its own.
    """

    def __init__(self, weights_dir: str | None, fallback: Path) -> None:
        root = Path(weights_dir) if weights_dir else default_root(fallback)
        root.mkdir(parents=True, exist_ok=True)
        remove_stale(root)
        self._stays = root == SHARED_MEMORY
        self._directory = root / f"{own_prefix()}{os.getpid()}"
        self._file: SafetensorsFile | None = None

    @asynccontextmanager
    async def offer(self, admin: EngineAdmin, update: Update) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Write the file; then let every engine load it."""
        directory = self._write(update)
        yield partial(admin.update_weights_from_disk, str(directory), update.version)

    def forget_engines(self) -> None:
        """Files know no engines."""

    def close(self) -> None:
        """Remove the directory."""
        if self._file is not None:
            self._file.close()
            self._file = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def _write(self, update: Update) -> Path:
        """The directory with this version."""
        # another machine may remember what it last saw under a path: there every version has its own
        directory = self._directory if self._stays else self._directory / f"v{update.version:06d}"
        metadata = {"format": "pt"} | ({"slime_checksums": json.dumps(update.checksums)} if update.checksums else {})
        try:
            if not self._stays:
                shutil.rmtree(self._directory, ignore_errors=True)
            directory.mkdir(parents=True, exist_ok=True)
            if self._stays:
                self._file = self._file or SafetensorsFile(directory / FILE)
                # off the GPU one by one, for a sharded model has room there for a few whole tensors only
                self._file.write([(name, tensor.cpu()) for name, tensor in update.tensors()], metadata)
            else:
                save_file({name: tensor.to("cpu") for name, tensor in update.tensors()}, directory / FILE, metadata)
        except (OSError, SafetensorError) as error:
            self.close()
            raise WeightSyncError(
                f"the weights of version {update.version} cannot be written to {directory}: {error}; --weights-dir "
                "names a place with room for the whole model."
            ) from None
        return directory


def default_root(fallback: Path) -> Path:
    """Shared memory where there is some, else the given directory."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK) else fallback
