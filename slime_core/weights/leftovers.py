"""Where trainers of this machine keep weights for their engines, and what killed ones left there."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import psutil

PREFIX = "slime-weights-"
SHARED_MEMORY = Path("/dev/shm")


def own_prefix() -> str:
    """How directories of this machine's, or this container's, processes begin: elsewhere a process id means nothing."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # not Linux
        namespace = 0
    return f"{PREFIX}{socket.gethostname()}-{namespace:x}-"


def remove_stale(root: Path) -> None:
    """Remove what trainers that were killed left there."""
    prefix = own_prefix()
    for directory in root.glob(f"{prefix}*"):
        pid = directory.name.removeprefix(prefix)
        if pid.isdigit() and not lives(int(pid)):
            shutil.rmtree(directory, ignore_errors=True)


def lives(pid: int) -> bool:
    """Whether there is such a process, and not only its exit code that nobody has asked for."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
