"""One reward worker process as the event loop sees it: started warm, sent calls, killed without mercy."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import TYPE_CHECKING, cast

from slime_core.options import Options
from slime_core.rollout import reward_worker
from slime_core.rollout.reward_worker import HEADER_BYTES, Reply, framed

if TYPE_CHECKING:
    from slime_core.rollout.reward_pool import Job


def fork_context() -> ForkServerContext:
    """Workers are forked from a clean server process that has the code imported: a killed one is replaced in ms."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", reward_worker.__name__])
    return context


def start_process(
    context: ForkServerContext, args: Options, references: Sequence[str]
) -> tuple[ForkServerProcess, socket.socket]:
    """A new worker and our end of its connection. Blocks while the fork server starts."""
    ours, theirs = socket.socketpair()
    with theirs:
        memory_bytes = int(args.reward_memory_gib * 2**30)
        process = context.Process(
            target=reward_worker.serve, args=(theirs, args, list(references), memory_bytes), daemon=True
        )
        process.start()
    ours.setblocking(False)
    return process, ours


class Worker(asyncio.Protocol):
    """The loop's end of one worker process: `jobs` are what it was sent and has not answered, the first one running."""

    def __init__(
        self,
        process: ForkServerProcess,
        on_reply: Callable[[Worker, Reply], None],
        on_end: Callable[[Worker], None],
    ) -> None:
        self.process = process
        self.jobs: deque[Job] = deque()
        self.ready = False
        self.running_since = 0.0
        """When the first job began: when it was sent, or when the one before it was answered."""
        self.num_replies = 0
        self.suspected_at = -1
        """`num_replies` when the running job was first seen to take too long."""
        self._on_reply = on_reply
        self._on_end = on_end
        self._incoming = bytearray()
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def idle(self) -> bool:
        """Whether it can be sent something."""
        return self.ready and not self.jobs

    def send(self, jobs: Sequence[Job]) -> None:
        """Give an idle worker something to do."""
        if self._transport is None:
            raise RuntimeError("a worker is sent nothing before it is connected")
        self.jobs.extend(jobs)
        self.running_since = self._loop.time()
        self._transport.write(framed([(job.number, job.pickled) for job in jobs]))

    def kill(self) -> None:
        """End the process and whatever it started, now."""
        self.ready = False
        pid = self.process.pid
        if pid is not None:
            if self.process.exitcode is None:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):  # a worker that died by itself may leave others behind, too
                os.killpg(pid, signal.SIGKILL)
        if self._transport is not None:
            self._transport.abort()

    def how_it_died(self) -> str:
        """The exit code as a reason. Waits for the process to be reaped."""
        self.process.join(5.0)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"its worker process was killed by {signal.Signals(-code).name}"
        return f"its worker process died with exit code {code}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by the loop with whatever replies have come."""
        incoming = self._incoming
        incoming += data
        start = 0
        while len(incoming) - start >= HEADER_BYTES:
            end = start + HEADER_BYTES + int.from_bytes(incoming[start : start + HEADER_BYTES], "little")
            if len(incoming) < end:
                break
            reply = Reply(*pickle.loads(memoryview(incoming)[start + HEADER_BYTES : end]))
            start = end
            self.num_replies += 1
            self.running_since = self._loop.time()
            self._on_reply(self, reply)
        del incoming[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop when the process is gone."""
        self.ready = False
        self._on_end(self)
