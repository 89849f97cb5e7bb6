"""Runs the model's code in a process that is confined, watched and killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from slime_core import OptionError
from slime_tool_python import jail
from slime_tool_python.disk import outgrown, processes_below

CODE_FILE = "code.py"
READ_BYTES = 65_536
BYTES_A_CHARACTER = 4
ENDING_S = 10.0
PROBE = """
import os, socket
def refused(attempt, *arguments):
    try:
        attempt(*arguments)
    except OSError:
        return True
print(refused(os.listdir, "/"), refused(socket.create_connection, ("127.0.0.1", 9), 1), 6 * 7)
"""
"""Prints `True True 42` where files and network are out of reach."""


@dataclass(frozen=True)
class Limits:
    """Of one run of code."""

    timeout_s: float
    memory_mib: int
    disk_mib: int
    max_processes: int
    max_output_characters: int


class CodeError(Exception):
    """The code failed or was ended; the message is what the model is told."""


async def run_code(code: str, limits: Limits, *, unsafe: bool = False) -> str:
    """What the code printed, on standard output and error together.

    Every run has a process, an empty working directory and nothing else: no network, no other files but those of the
    Python installation to read, no environment.

    Args:
        unsafe: without the sandbox, under the limits of time, memory and output alone.

    Raises:
        CodeError: with what it printed and why, when it raised, exited with an error, or broke a limit.
    """
    place = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="slime-tool-python-"))
    try:
        return await _run_in(place, code, limits, unsafe)
    finally:
        await asyncio.shield(_remove(place))


async def _run_in(directory: Path, code: str, limits: Limits, unsafe: bool) -> str:
    # what is no Unicode text (half a surrogate pair) becomes a syntax error of the code's own
    (directory / CODE_FILE).write_bytes(code.encode("utf-8", "surrogatepass"))
    task = {
        **asdict(limits),
        "directory": str(directory),
        "file": CODE_FILE,
        "cpu_s": math.ceil(limits.timeout_s) + 1,
        "unsafe": unsafe,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        jail.__file__,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={},
        start_new_session=True,
    )
    ended = None
    said = bytearray()
    try:
        async with asyncio.timeout(limits.timeout_s) as clock:
            _send(process, json.dumps(task).encode() + b"\n")
            ended = await _watched(process, said, directory, limits)
    except TimeoutError:
        if not clock.expired():
            raise
        ended = f"it was stopped after {limits.timeout_s:g} s"
    finally:
        await asyncio.shield(_end(process))
    text = _shown(said, directory, limits.max_output_characters)
    if ended is None and process.returncode == jail.KILLED:
        ended = f"it was killed: it may have used more than {limits.memory_mib} MiB of memory"
    elif ended is None and process.returncode:
        ended = "" if "Traceback" in text or "Error" in text else f"it exited with code {process.returncode}"
    if ended is not None:
        raise CodeError("\n".join(part for part in (text, ended) if part))
    return text


async def _watched(process: asyncio.subprocess.Process, said: bytearray, directory: Path, limits: Limits) -> str | None:
    """Read what the process prints until it ends, or breaks a limit: then which."""
    reading = asyncio.ensure_future(_read(process, said, BYTES_A_CHARACTER * limits.max_output_characters))
    writing = asyncio.ensure_future(outgrown(directory, limits.disk_mib * 2**20, process.pid))
    try:
        await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            writing.result()
            return f"it was stopped: it wrote more than {limits.disk_mib} MiB"
        if not reading.result():
            return f"it was stopped: it printed far more than {limits.max_output_characters} characters"
        await process.wait()
        return None
    finally:
        for task in (reading, writing):
            task.cancel()
        await asyncio.gather(reading, writing, return_exceptions=True)


async def _remove(place: Path) -> None:
    """As `rm` does it: code can nest directories deeper than Python's own functions follow."""
    removing = await asyncio.create_subprocess_exec("rm", "-rf", "--", str(place), stderr=asyncio.subprocess.DEVNULL)
    await removing.wait()


async def _read(process: asyncio.subprocess.Process, said: bytearray, most: int) -> bool:
    """Append what the process prints, `most` bytes at the most; whether that was all."""
    while process.stdout is not None and (chunk := await process.stdout.read(READ_BYTES)):
        said += chunk[: most + 1 - len(said)]
        if len(said) > most:
            return False
    return True


def _send(process: asyncio.subprocess.Process, content: bytes) -> None:
    if process.stdin is not None:
        process.stdin.write(content)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Let the jail end what runs in it, which it does when its input closes; what its pipe still holds is read."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(ENDING_S):
            await _drained(process)
    except TimeoutError:
        # nobody can find them once their parent is gone
        below = list(processes_below(process.pid))
        _kill(process)
        for inside in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(inside, signal.SIGKILL)
        await _drained(process)


async def _drained(process: asyncio.subprocess.Process) -> None:
    while process.stdout is not None and await process.stdout.read(READ_BYTES):
        pass
    await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _shown(said: bytearray, directory: Path, most: int) -> str:
    """The output as text, its middle left out where it is long, without the path of the working directory."""
    text = said.decode("utf-8", "replace").replace(f"{directory}{os.sep}", "").strip()
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[len(text) - half :]}"


def missing_protection() -> str | None:
    """Why code cannot be confined on this system; None where it can, as far as can be told without running any."""
    if sys.platform != "linux":
        return f"the sandbox needs Linux, and this is {sys.platform}"
    try:
        import sandlock
    except (ImportError, OSError) as error:
        return f"the library sandlock cannot be loaded: {error}"
    have, needed = sandlock.landlock_abi_version(), sandlock.min_landlock_abi()
    if have < needed:
        what = "no Landlock" if have < 0 else f"Landlock version {have}"
        return f"this kernel has {what}, and the sandbox needs version {needed} (Linux 6.12)"
    if not os.path.exists("/proc/thread-self/children"):
        return "/proc does not tell a process's children (kernel option CONFIG_PROC_CHILDREN)"
    return None


async def require_protection(limits: Limits) -> None:
    """Try the sandbox.

    Raises:
        OptionError: when it does not keep code from files and the network.
    """
    problem = missing_protection()
    if problem is None:
        try:
            said = await run_code(PROBE, limits)
        except CodeError as error:
            said = str(error)
        problem = None if said == "True True 42" else f"a trial run in the sandbox gave {said[-500:]!r}"
    if problem is not None:
        raise OptionError(
            f"--generate tool_python cannot confine the model's code: {problem}. --tool-python-unsafe runs it without "
            "the sandbox, with all that this user may do; only limits of time, memory and output are left."
        )
