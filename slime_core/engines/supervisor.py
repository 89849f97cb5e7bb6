"""Run one server command, and end it with everything it started when the process that asked for it is gone.

    python supervisor.py COMMAND ARG...

Standard input is a pipe whose other end the asking process holds and never writes to: when that process exits, however
it ends, the pipe closes. Should the supervisor itself be killed, the kernel kills the server (Linux). Run as a file, so
that it imports nothing but the standard library.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from types import FrameType

PR_SET_PDEATHSIG = 1
GRACE_S = 5.0
"""How long the server may take to stop before it is killed."""


def main(command: list[str]) -> int:
    """Exit with the server's own code."""
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_supervisor
    )
    stopping = threading.Event()

    def stop() -> None:
        if stopping.is_set():
            return
        stopping.set()
        server.terminate()
        threading.Timer(GRACE_S, _kill_group, (server.pid,)).start()

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


if __name__ == "__main__":
    main(sys.argv[1:])
