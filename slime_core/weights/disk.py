"""Weights by disk: the trainer writes safetensors to /dev/shm or a directory, the engines read them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil

from slime_core.engines.admin import EngineAdmin

PREFIX = "slime-weights-"
SHARED_MEMORY = Path("/dev/shm")


class DiskTransport:
    """A directory that holds one version while the engines read it."""

    def __init__(self, weights_dir: str | None, fallback: Path) -> None:
        root = Path(weights_dir) if weights_dir else default_root(fallback)
        root.mkdir(parents=True, exist_ok=True)
        remove_stale(root)
        self._directory = root / f"{PREFIX}{os.getpid()}"

    async def send(self, admin: EngineAdmin, export: Callable[[Path], dict[str, str]], version: int) -> dict[str, str]:
        """Write, let every engine load, remove; returns what `export` does."""
        directory = self._directory / f"v{version:06d}"
        directory.mkdir(parents=True, exist_ok=True)
        try:
            checksums = export(directory)
            await admin.update_weights_from_disk(str(directory), version)
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)
        return checksums


def default_root(fallback: Path) -> Path:
    """Shared memory where there is some, else the given directory."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK) else fallback


def remove_stale(root: Path) -> None:
    """Remove what trainers that were killed in the middle of an update left there."""
    for directory in root.glob(f"{PREFIX}*"):
        pid = directory.name.removeprefix(PREFIX)
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(directory, ignore_errors=True)
