"""Server processes: errors with the log's end, and no life after the owner's death, however it died."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from processes import gone
from slime_core import EngineError
from slime_core.engines.process import LOOPBACK, ServerProcess, free_port, port_is_free
from slime_core.engines.router import Router
from slime_core.options import parse
from waiting import wait_until

SHM = Path("/dev/shm")
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def pids_in(log: Path) -> list[int]:
    wait_until(lambda: len(log.read_text().split()) == 2 if log.exists() else False)
    return [int(word) for word in log.read_text().split()]


def test_stop_ends_a_stubborn_server_and_its_children(tmp_path):
    server = ServerProcess("server", [sys.executable, "-c", STUBBORN], tmp_path / "log")
    pids = pids_in(tmp_path / "log")
    server.stop()
    wait_until(lambda: gone(pids))
    assert server.exit_code() is not None


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_does_not_outlive_the_process_that_started_it(tmp_path, how):
    owner_code = (
        "import sys, time\nfrom pathlib import Path\nfrom slime_core.engines.process import ServerProcess\n"
        f"ServerProcess('server', [sys.executable, '-c', {STUBBORN!r}], Path({str(tmp_path / 'log')!r}))\n"
        "time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", owner_code])
    pids = pids_in(tmp_path / "log")
    os.kill(owner.pid, how)
    owner.wait()
    wait_until(lambda: gone(pids))
    assert gone(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of this system cannot tie a child to its parent")
def test_a_server_dies_with_a_killed_supervisor(tmp_path):
    server = ServerProcess("server", [sys.executable, "-c", STUBBORN], tmp_path / "log")
    pids = pids_in(tmp_path / "log")
    os.kill(server._process.pid, signal.SIGKILL)
    wait_until(lambda: gone(pids[:1]))
    os.kill(pids[1], signal.SIGKILL)  # the grandchild is the server's own to end
    assert gone(pids[:1])


SHARING = """
import mmap, sys, time
from pathlib import Path

maps = []
for name in sys.argv[1:]:
    nameless = Path(name + ".part")
    with nameless.open("wb+") as file:
        file.truncate(4096)
        maps.append(mmap.mmap(file.fileno(), 4096))
    Path(name).hardlink_to(nameless)
    nameless.unlink()
print("ready", flush=True)
time.sleep(600)
"""
"""Maps files before they get their names, as semaphores are."""


@pytest.mark.skipif(not SHM.is_dir(), reason="this system has no /dev/shm")
def test_what_a_killed_sglang_had_in_shared_memory_is_removed(tmp_path):
    mark = f"{os.getpid()}_{time.monotonic_ns()}"
    own = [SHM / f"sgl_shm_mq_{mark}", SHM / f"sem.mp-{mark}", SHM / f"sglang_loads_{mark}.shm"]
    weights, anothers = SHM / f"slime-test-{mark}", SHM / f"sgl_shm_mq_{mark}_another"
    anothers.touch()
    command = [sys.executable, "-c", SHARING, *map(str, [*own, weights])]
    server = ServerProcess("server", command, tmp_path / "log")
    try:
        wait_until(lambda: (tmp_path / "log").read_text() == "ready\n")
        server.stop()
        assert not any(path.exists() for path in own)
        assert weights.exists() and anothers.exists(), "what it only reads, and another server's, are not its to remove"
    finally:
        server.stop()
        for path in SHM.glob(f"*{mark}*"):
            path.unlink()


def test_a_server_that_exits_shows_the_end_of_its_log(tmp_path):
    code = "import sys; print('line one'); sys.exit('cannot bind')"
    server = ServerProcess("engine 0", [sys.executable, "-c", code], tmp_path / "log")
    with pytest.raises(EngineError, match=r"(?s)engine 0 exited with code 1.*line one.*cannot bind"):
        server.wait_until(lambda: False, 20)


def test_a_server_that_never_gets_ready_is_given_up(tmp_path):
    server = ServerProcess("engine 0", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    with pytest.raises(EngineError, match="engine 0 was not ready after 0 s"):
        server.wait_until(lambda: False, 0.2)
    server.stop()


def test_a_free_port_is_none_that_an_outgoing_connection_may_get():
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as outgoing:
            given = outgoing.getsockname()[1]
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 15 and max(ports) < given


def test_a_busy_router_port_is_refused_by_number(tmp_path, model_dir):
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-m", "http.server", str(port), "--bind", LOOPBACK],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as other:
        wait_until(lambda: not port_is_free(port))
        args = parse(["--model", str(model_dir), "--router-port", str(port)]).args
        with pytest.raises(EngineError, match=f"port {port} on 127.0.0.1 is in use; give --router-port another one"):
            Router(args, [], tmp_path)
        other.kill()
