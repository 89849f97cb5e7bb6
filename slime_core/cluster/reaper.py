"""End the processes of a run whose driver was killed before it could do so itself.

    python reaper.py LEFTOVERS

The driver writes one line `PID START_TIME` a process to standard input and keeps the pipe open. A line `done` means
that it has cleaned up; the end of the pipe without it, that it is gone. Ray's own agents would otherwise linger for
minutes. Either way a trainer that was killed has left its weights in shared memory, which LEFTOVERS, the file
weights/leftovers.py, removes. Run as a file of its own, by the interpreter that has psutil.
"""

import contextlib
import runpy
import sys
import time
from typing import Any

import psutil

GRACE_S = 3.0
"""How long the processes may take to notice by themselves."""

DYING_S = 30.0
"""How long a process that was killed may take to be gone."""

POLL_S = 0.02


def main() -> None:
    """Wait for the driver's end."""
    leftovers = runpy.run_path(sys.argv[1])
    processes: list[psutil.Process] = []
    for line in sys.stdin:
        if line.strip() == "done":
            sweep(processes, leftovers)
            return
        pid, started = line.split()
        process = find(int(pid), float(started))
        if process is not None:
            processes.append(process)
    time.sleep(GRACE_S)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    sweep(processes, leftovers)


def sweep(processes: list[psutil.Process], leftovers: dict[str, Any]) -> None:
    """Remove the weights of trainers, which are dead or dying."""
    root, prefix = leftovers["SHARED_MEMORY"], leftovers["own_prefix"]()
    writers = [process.pid for process in processes if (root / f"{prefix}{process.pid}").exists()]
    deadline = time.monotonic() + DYING_S
    while any(map(leftovers["lives"], writers)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    leftovers["remove_stale"](root)


def find(pid: int, started: float) -> psutil.Process | None:
    """The process, unless it is gone or its number was given to another."""
    try:
        process = psutil.Process(pid)
        return process if process.create_time() == started else None
    except psutil.NoSuchProcess:
        return None


if __name__ == "__main__":
    main()
