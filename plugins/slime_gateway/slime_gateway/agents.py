"""Agent processes as the event loop sees them: started once, given tasks, killed when they do not let go."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from slime_core import PluginError
from slime_gateway.outcome import Outcome, outcome_of
from slime_gateway.task import Task
from slime_gateway.worker import LONGEST_LINE_BYTES

logger = logging.getLogger(__name__)

CANCEL_TIMEOUT_S = 3.0
"""How long a cancelled agent may hold on before its process is killed, and with it the other agents in there."""
CLOSED = "--generate gateway has been closed and starts no agent."

OnEnd = Callable[[Outcome], None]


class AgentProcess:
    """One worker process with any number of agents. It is started with the first task, and again after it died."""

    def __init__(self, words: Sequence[str], directory: Path) -> None:
        self._words = list(words)
        self._directory = directory
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._usable = False
        self._closed = False
        self._num_starting = 0
        self._running: dict[str, OnEnd] = {}
        self._numbers = itertools.count()
        self._reading: asyncio.Task[None] | None = None
        self._logging: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    @property
    def num_running(self) -> int:
        """Agents at work, or about to be."""
        return len(self._running) + self._num_starting

    async def start(self, task: Task, on_end: OnEnd) -> str:
        """Set an agent to work on a task; `on_end` gets its outcome. Returns what `cancel` takes.

        Raises:
            PluginError: when the agent cannot be loaded, or this has been closed.
        """
        self._num_starting += 1
        try:
            async with self._starting:
                if self._closed:
                    raise PluginError(CLOSED)
                if not self._usable:
                    await self._launch()
        finally:
            self._num_starting -= 1
        number = str(next(self._numbers))
        self._running[number] = on_end
        self._send({"start": number, "task": task.to_dict()})
        return number

    async def cancel(self, number: str) -> None:
        """End an agent; one that does not let go in time is killed with its process."""
        if number not in self._running:
            return
        self._running[number] = lambda outcome: None
        self._send({"cancel": number})
        deadline = asyncio.get_running_loop().time() + CANCEL_TIMEOUT_S
        while number in self._running:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                logger.warning("an agent did not end when it was cancelled; its process is killed")
                self.kill()
                return
            self._ended.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._ended.wait()

    def kill(self) -> None:
        """End the process and its agents, now."""
        self._usable = False
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it, also if it is being started now."""
        self._closed = True
        self.kill()

    async def _launch(self) -> None:
        if self._reading is not None:
            await self._reading
        # not a pipe of asyncio's: for what an agent has left running that holds it open, `wait` would wait
        printed, printing = os.pipe()
        self._logging = asyncio.create_task(_log(printed))
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "slime_gateway.worker",
                *self._words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=printing,
                cwd=self._directory,
                env={**os.environ, "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"},
                start_new_session=True,
                limit=LONGEST_LINE_BYTES,
            )
        finally:
            os.close(printing)
        self._process = process
        if self._closed:
            self.kill()
        try:
            line = await process.stdout.readline() if process.stdout is not None else b""
        except asyncio.CancelledError:
            self.kill()
            raise
        said = json.loads(line) if line else {"refused": f"its process exited with code {await process.wait()}"}
        if "refused" in said:
            await process.wait()
            raise PluginError(
                CLOSED if self._closed else f"the agent of --generate gateway cannot be used: {said['refused']}"
            )
        self._reading = asyncio.create_task(self._read(process))
        self._usable = True

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        while process.stdout is not None and (line := await process.stdout.readline()):
            said = json.loads(line)
            on_end = self._running.pop(said["ended"], None)
            if on_end is not None:
                on_end(_outcome(said))
            self._ended.set()
        self._usable = False
        code = await process.wait()
        running, self._running = self._running, {}
        for on_end in running.values():
            on_end(Outcome(error=f"the agents' process died ({_how(code)})"))
        self._ended.set()

    def _send(self, message: dict[str, object]) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")


async def _log(printed: int) -> None:
    """Write what agents print to the log, until nobody can print any more."""
    lines = asyncio.StreamReader(limit=LONGEST_LINE_BYTES)
    loop = asyncio.get_running_loop()
    pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(printed, "rb"))
    try:
        while line := await lines.readline():
            logger.info("agent: %s", line.decode(errors="replace").rstrip())
    finally:
        pipe.close()


def _outcome(said: dict[str, object]) -> Outcome:
    if "error" in said:
        return Outcome(error=f"the agent failed: {said['error']}")
    try:
        return outcome_of(said["result"])
    except ValueError as error:
        return Outcome(error=f"the agent returned what cannot be used: {error}")


def _how(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
