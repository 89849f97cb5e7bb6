"""End the processes of a run whose driver was killed before it could do so itself.

    python reaper.py WEIGHTS

The driver writes one line `PID START_TIME` a process to standard input and keeps the pipe open. A line `done` means
that it has cleaned up; the end of the pipe without it, that it is gone. Ray's own agents would otherwise linger for
minutes. WEIGHTS is how the path of a trainer's weights in shared memory begins; its process id follows. Run as a file
of its own, by the interpreter that has psutil.
"""

import contextlib
import shutil
import sys
import time

import psutil

GRACE_S = 3.0
"""How long the processes may take to notice by themselves."""


def main() -> None:
    """Wait for the driver's end."""
    processes: list[psutil.Process] = []
    for line in sys.stdin:
        if line.strip() == "done":
            return
        pid, started = line.split()
        process = find(int(pid), float(started))
        if process is not None:
            processes.append(process)
    time.sleep(GRACE_S)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        shutil.rmtree(f"{sys.argv[1]}{process.pid}", ignore_errors=True)


def find(pid: int, started: float) -> psutil.Process | None:
    """The process, unless it is gone or its number was given to another."""
    try:
        process = psutil.Process(pid)
        return process if process.create_time() == started else None
    except psutil.NoSuchProcess:
        return None


if __name__ == "__main__":
    main()
