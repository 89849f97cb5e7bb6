"""The process that runs the user's agents: `python -m slime_gateway.worker function FILE NAME | command COMMAND`.

Lines of JSON come on standard input: `{"start": ID, "task": {...}}` and `{"cancel": ID}`. Lines go out where standard
output was: `{"ready": true}` once the agent is loaded, or `{"refused": WHY}`; then for every start one
`{"ended": ID, "result": ...}` or `{"ended": ID, "error": WHY}`. When the input ends, so do the agents and this process.
What agents print goes to standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import inspect
import io
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO, Any, BinaryIO

from slime_gateway.task import Task

LONGEST_LINE_BYTES = 256 * 2**20
NUM_ERROR_CHARACTERS = 1000
LOGGED_BYTES = 2**16
"""Of what a command says on standard error."""
PR_SET_PDEATHSIG = 1

Agent = Callable[[Task], Awaitable[Any]]


def main(words: list[str]) -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # as on a terminal: a process that is killed has told its lines
    try:
        agent = load_function(Path(words[1]), words[2]) if words[0] == "function" else command_agent(words[1])
    except _Refused as refused:
        _say(answers, {"refused": str(refused)})
        return
    _say(answers, {"ready": True})
    asyncio.run(serve(agent, answers))


class _Refused(Exception):
    """The agent cannot be used; the message is for the user."""


def load_function(path: Path, name: str) -> Agent:
    """The async function of a file; its folder can be imported from, as when Python runs the file."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise _Refused(f"there is no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        raise _Refused(f"{path} cannot be loaded: {type(error).__name__}: {error}") from None
    function = getattr(module, name, None)
    if function is None:
        raise _Refused(f"{path} has no function '{name}'; write `async def {name}(task)`, or name another: FILE:NAME")
    if not inspect.iscoroutinefunction(function):
        raise _Refused(f"'{name}' of {path} must be `async def`; a program that blocks goes into --gateway-command")
    loaded: Agent = function
    return loaded


def command_agent(command: str) -> Agent:
    """An agent that is a shell command: the task as JSON on its standard input, addresses and keys in its environment.

    It ends its session by itself (`POST /buffer/write`), or by exiting.
    """

    async def run(task: Task) -> None:
        environment = {
            **os.environ,
            "OPENAI_BASE_URL": task.base_url,
            "OPENAI_API_KEY": task.api_key,
            "ANTHROPIC_BASE_URL": task.anthropic_base_url,
            "ANTHROPIC_API_KEY": task.api_key,
        }
        # files, not pipes: what a command leaves running may hold them open, or nobody may read
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as complaints:
            given.write(json.dumps(task.to_dict()).encode())
            given.seek(0)
            process = await asyncio.create_subprocess_shell(
                command,
                stdin=given,
                stderr=complaints,
                env=environment,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
            try:
                await process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                text = _tail(complaints)
                print(text, file=sys.stderr, flush=True)
        if process.returncode:
            raise RuntimeError(
                f"the command exited with code {process.returncode}: "
                f"{text[-NUM_ERROR_CHARACTERS:].strip() or '(no message)'}"
            )

    return run


def _tail(file: IO[bytes]) -> str:
    """The end of what a command said."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - LOGGED_BYTES))
    return file.read().decode(errors="replace")


async def serve(agent: Agent, answers: BinaryIO) -> None:
    """Run agents as the lines of standard input say."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=LONGEST_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    running: dict[str, asyncio.Task[None]] = {}
    while line := await lines.readline():
        message = json.loads(line)
        if "start" in message:
            number = message["start"]
            running = {key: task for key, task in running.items() if not task.done()}
            running[number] = asyncio.create_task(_run(agent, number, Task(**message["task"]), answers))
            await asyncio.sleep(0)  # a thousand that begin in one turn of the loop would hold it for seconds
        elif message["cancel"] in running:
            running[message["cancel"]].cancel()
    for task in running.values():
        task.cancel()
    await asyncio.gather(*running.values(), return_exceptions=True)


async def _run(agent: Agent, number: str, task: Task, answers: BinaryIO) -> None:
    try:
        ended: dict[str, Any] = {"result": await agent(task)}
        json.dumps(ended)
    except asyncio.CancelledError:
        ended = {"error": "it was cancelled"}
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        ended = {"error": f"{type(error).__name__}: {error}"[:NUM_ERROR_CHARACTERS]}
    _say(answers, {"ended": number, **ended})


def _say(answers: BinaryIO, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        answers.write(json.dumps(message).encode() + b"\n")


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
