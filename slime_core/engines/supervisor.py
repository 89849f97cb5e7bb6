"""Run one server command, and end it with everything it started when the process that asked for it is gone.

    python supervisor.py COMMAND ARG...

Standard input is a pipe whose other end the asking process holds and never writes to: when that process exits, however
it ends, the pipe closes. Should the supervisor itself be killed, the kernel kills the server (Linux). Run as a file, so
that it imports nothing but the standard library.
"""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1
GRACE_S = 5.0
"""How long the server may take to stop before it is killed."""

SHARED_MEMORY = ("sgl_shm_", "sglang_loads_", "sem.mp-")
"""How files in /dev/shm begin that SGLang makes for itself alone, and leaves there when it is killed: to stop by itself
it may take longer than GRACE_S."""


def main(command: list[str]) -> int:
    """Exit with the server's own code."""
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_supervisor
    )
    stopping = threading.Event()
    left: list[str] = []

    def stop() -> None:
        if stopping.is_set():
            return
        stopping.set()
        threading.Timer(GRACE_S, _kill_group, (server.pid,)).start()
        left.extend(_shared_memory(server.pid))
        server.terminate()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop()

    def watch_parent() -> None:
        while os.read(0, 4096):
            pass
        stop()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch_parent, daemon=True).start()
    code = server.wait()
    _kill_group(server.pid)
    for path in left:
        with contextlib.suppress(OSError):
            os.unlink(path)
    sys.stdout.flush()
    os._exit(code if code >= 0 else 128 - code)


def _die_with_supervisor() -> None:
    """Runs in the server before its command starts; nothing else runs in the supervisor yet."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def _shared_memory(leader: int) -> list[str]:
    """The files of SHARED_MEMORY that processes of the group have mapped.

    Told by inode: a semaphore is mapped before it gets its name.
    """
    inodes: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is none of ours
            if os.getpgid(int(process.name)) == leader:
                maps = (process / "maps").read_text(errors="replace")
                inodes.update(map(int, re.findall(r"(\d+) +/dev/shm/", maps)))
    if not inodes:
        return []
    with os.scandir("/dev/shm") as files:
        return [file.path for file in files if file.name.startswith(SHARED_MEMORY) and file.inode() in inodes]


if __name__ == "__main__":
    main(sys.argv[1:])
