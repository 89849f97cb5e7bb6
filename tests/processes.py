"""Which processes still run; one may end between any two questions about it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil


def living(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Those that run: neither gone nor zombies."""
    found = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return found


def grandchildren() -> set[psutil.Process]:
    """Living children of this process's children, and theirs: the fork server's, which is itself a child."""
    own = psutil.Process()
    return living(set(own.children(recursive=True)) - set(own.children()))


def running(*words: str) -> bool:
    """Whether any process of this machine has this command line."""
    return any(process.info["cmdline"] == [*words] for process in psutil.process_iter(["cmdline"]))


def gone(pids: Iterable[int]) -> bool:
    """Whether none of these processes lives."""
    known = set(pids)
    return not living(process for process in psutil.process_iter() if process.pid in known)
