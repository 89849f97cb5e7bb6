"""Runs in a reward worker process: loads the plugins by name and grades what it is sent, one sample after the other."""

from __future__ import annotations

import contextlib
import ctypes
import numbers
import os
import pickle
import resource
import signal
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from typing import Any, NamedTuple

from slime_core.errors import SlimeError
from slime_core.options import Options
from slime_core.plugins import Plugins, load_plugins

PR_SET_PDEATHSIG = 1
MAX_REASON = 500
"""Characters of a failure's text that are kept: an exception may quote the whole answer."""

HEADER_BYTES = 4
"""A message is its length, little endian, and a pickle: towards a worker a list of `(number, pickled Call)`."""


class Call(NamedTuple):
    """One thing to grade."""

    hook: str
    reference: str
    subject: dict[str, Any]


class Reply(NamedTuple):
    """What became of one call; number -1 says that the worker is ready, or why it could not start."""

    number: int
    result: Any = None
    failure: str | None = None
    seconds: float = 0.0
    retires: bool = False
    """Whether the process ends now, before the calls that it still holds."""


def serve(connection: socket.socket, args: Options, references: Sequence[str], memory_bytes: int) -> None:
    """Prepare the process, then answer every call, in order, until the connection ends."""
    os.setsid()  # what a grader starts is killed with it
    _die_with_parent()
    _let_the_fork_server_end()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-c is the parent's to handle
    with contextlib.suppress(ValueError, OSError):  # macOS refuses an address-space limit
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    try:
        plugins = load_plugins(args, references)
    except (Exception, SystemExit) as error:
        text = str(error) if isinstance(error, SlimeError) else reason_of(error)
        _send(connection, Reply(-1, failure=text))
        return
    _send(connection, Reply(-1))
    with connection.makefile("rb") as incoming:
        while header := incoming.read(HEADER_BYTES):
            calls: list[tuple[int, bytes]] = pickle.loads(incoming.read(int.from_bytes(header, "little")))
            for number, pickled in calls:
                reply = answer(args, plugins, number, pickled)
                _send(connection, reply)
                if reply.retires:
                    return


def answer(args: Options, plugins: Plugins, number: int, pickled: bytes) -> Reply:
    """Grade one call. The exception types of a plugin need not exist in the parent, so their text travels."""
    started = time.perf_counter()
    result, failure, retires = None, None, False
    try:
        call = Call(*pickle.loads(pickled))
        result = plain(plugins.bind(call.hook, call.reference)(args=args, engine=None, **call.subject))
    except MemoryError as error:
        # what filled the memory may still be referenced, and fail every later call
        result, failure, retires = None, reason_of(error), True
    except (Exception, SystemExit) as error:
        result, failure = None, reason_of(error)
    return Reply(number, result, failure, time.perf_counter() - started, retires)


def plain(result: Any) -> Any:
    """A result without the plugin's types, which need not exist in the parent: numbers, and dicts and lists of them.

    Raises:
        TypeError: for anything else but None and texts, which the parent has words for.
    """
    if result is None or isinstance(result, str | bool):
        return str(result)[:MAX_REASON] if isinstance(result, str) else result
    if isinstance(result, numbers.Real):
        return float(result)
    if isinstance(result, dict):
        return {str(key): plain(value) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return [plain(entry) for entry in result]
    raise TypeError(f"returned {type(result).__name__} where a number, or a dict of numbers, is needed")


def reason_of(error: BaseException) -> str:
    """An exception as text, of bounded length."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."


def framed(message: Any) -> bytes:
    """A message as it goes over the connection."""
    pickled = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(pickled).to_bytes(HEADER_BYTES, "little") + pickled


def _send(connection: socket.socket, reply: Reply) -> None:
    connection.sendall(framed(tuple(reply)))


def _let_the_fork_server_end() -> None:
    """It lives while any process holds this pipe: it would wait for a grader that hangs, and the grader for its end."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def _die_with_parent() -> None:
    """A grader stuck in C code notices nothing; the kernel ends it when the parent goes (Linux)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was killed just before
            os._exit(1)
