"""Server processes: started with a log file, watched while they get ready, and gone when their owner is."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from slime_core.engines import supervisor
from slime_core.errors import EngineError

LOOPBACK = "127.0.0.1"
FIRST_PORT = 20_000
OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Proxies of the environment are not for a run's own servers."""


class ServerProcess:
    """A command in a process group of its own, with its output in a log file; it does not outlive this process."""

    def __init__(
        self, name: str, command: Sequence[str], log_path: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", supervisor.__file__, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )

    def exit_code(self) -> int | None:
        """The server's exit code, None while it runs."""
        return self._process.poll()

    def check(self) -> None:
        """Do nothing while the server runs.

        Raises:
            EngineError: with the end of its log, when it has exited.
        """
        if (code := self.exit_code()) is not None:
            raise EngineError(f"{self.name} exited with code {code}.\n{self.log_tail()}")

    def wait_until(self, ready: Callable[[], bool], timeout_s: float, poll_s: float = 0.05) -> None:
        """Poll until `ready()`.

        Raises:
            EngineError: with the end of the log, when the server exits or the time is over.
        """
        deadline = time.monotonic() + timeout_s
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise EngineError(f"{self.name} was not ready after {timeout_s:.0f} s.\n{self.log_tail()}")
            time.sleep(poll_s)

    def listens_on(self, port: int) -> bool:
        """Whether the server, or a process that it started, takes connections on the port."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return any(_listens_on(process, port) for process in psutil.Process(self._process.pid).children(True))
        return False

    def log_tail(self, num_lines: int = 15) -> str:
        """The last lines of the log, for error messages."""
        lines = self.log_path.read_text(errors="replace").splitlines()[-num_lines:]
        return "\n".join([f"The last lines of {self.log_path}:", *(f"  {line}" for line in lines)])

    def stop(self) -> None:
        """End the server and everything it started; returns when they are gone."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(supervisor.GRACE_S + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def free_port(host: str = LOOPBACK) -> int:
    """A port that was free a moment ago; whoever uses it must be ready to try another.

    It is none of those that the system gives to outgoing connections, one of which might take it while a server is
    still loading its model.
    """
    below = range(FIRST_PORT, _first_outgoing_port())
    for port in random.SystemRandom().sample(below, min(100, len(below))):
        if port_is_free(port, host):
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _first_outgoing_port() -> int:
    try:
        return int(OUTGOING_PORTS.read_text().split()[0])
    except (OSError, ValueError):  # not Linux
        return 32768


def port_is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server could listen on the port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _listens_on(process: psutil.Process, port: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        sockets = process.net_connections("tcp")
        return any(found.status == psutil.CONN_LISTEN and found.laddr.port == port for found in sockets)
    return False


def listens(url: str, timeout_s: float = 5.0) -> bool:
    """Whether somebody takes connections there, however long the answers may take."""
    address = urlsplit(url)
    try:
        with socket.create_connection((address.hostname or LOOPBACK, address.port or 80), timeout_s):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        return True


def answers(url: str, timeout_s: float = 5.0) -> bool:
    """Whether a GET of the URL answers 200."""
    return status_of(url, timeout_s) == 200


def status_of(url: str, timeout_s: float) -> int | None:
    """What a GET of the URL answers; None for no answer."""
    try:
        with DIRECT.open(url, timeout=timeout_s) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None
