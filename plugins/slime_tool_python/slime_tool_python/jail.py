"""The process around one run of the model's code: `python jail.py`, its task as one line of JSON on standard input.

It confines the code with sandlock (Landlock, seccomp, a supervisor for memory and processes), gives it this process's
standard output, and exits with its code, or with 200 when the sandbox killed it. When standard input is closed, or its
writer dies, the run ends at once. Nothing that the code started outlives this process. Run as a file of its own, so
that it imports next to nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

KILLED = 200
"""Exit code when the sandbox, not the code itself, ended the run."""
STOPPED = 201
"""Exit code when standard input was closed first."""

PR_SET_CHILD_SUBREAPER = 36
REAPING_S = 5.0

SYSTEM_PATHS = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom")

UNGUARDED_SYSCALLS = (
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "utime", "utimes",
    "utimensat", "futimesat", "setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr",
    "sethostname", "setdomainname", "settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "setpriority",
    "chroot", "memfd_create", "memfd_secret",
)  # fmt: skip
"""What changes other files or the machine though Landlock does not cover it, and memory that no limit counts; refused,
as a run may belong to root."""


def main() -> int:
    """The exit code."""
    task: dict[str, Any] = json.loads(sys.stdin.readline())
    asker = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _limit(task)
    ended, ending = os.pipe()
    codes: list[int] = []

    def run() -> None:
        try:
            codes.append(_run(task))
        finally:
            os.close(ending)

    threading.Thread(target=run, daemon=True).start()
    readable, _, _ = select.select([asker, ended], [], [])
    code = STOPPED if ended not in readable else codes[0] if codes else KILLED
    _end_descendants()
    return code


def _limit(task: dict[str, Any]) -> None:
    for kind, limit in (
        (resource.RLIMIT_CPU, task["cpu_s"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, task["disk_mib"] * 2**20),
    ):
        resource.setrlimit(kind, (limit, limit))


def _run(task: dict[str, Any]) -> int:
    directory = task["directory"]
    command = [sys.executable, "-I", "-B", "-u", os.path.join(directory, task["file"])]
    environment = {
        "HOME": directory,
        "TMPDIR": directory,
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        # libraries of numerics would otherwise start a thread a core, each with memory of its own
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    memory_bytes = task["memory_mib"] * 2**20
    if task["unsafe"]:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        code = subprocess.call(command, cwd=directory, env=environment)
    else:
        from sandlock import Sandbox

        sandbox = Sandbox(
            fs_readable=[path for path in (*SYSTEM_PATHS, sys.prefix, sys.base_prefix) if os.path.exists(path)],
            fs_writable=[directory],
            cwd=directory,
            max_memory=memory_bytes,
            max_processes=task["max_processes"],
            max_open_files=256,
            extra_deny_syscalls=UNGUARDED_SYSCALLS,
            no_coredump=True,
            clean_env=True,
            env=environment,
        )
        code = sandbox.run_interactive(command)
    return code if 0 <= code < KILLED else KILLED


def _end_descendants() -> None:
    """Kill what the code left, children of children included: as their reaper this process inherits them all."""
    deadline = time.monotonic() + REAPING_S
    while (alive := _descendants()) and time.monotonic() < deadline:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _descendants() -> list[int]:
    """Living processes below this one."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{int(name)}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                parents[int(name)] = int(parent)
    found, generation = [], [os.getpid()]
    while generation:
        generation = [pid for pid, parent in parents.items() if parent in generation]
        found += generation
    return found


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the thread that waits for the sandbox need not come back
