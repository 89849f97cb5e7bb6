"""Code that tries to get out, to take everything, or never to end: contained, told to the model, gone afterwards."""

import asyncio
import contextlib
import errno
import os
import socket
import subprocess
import threading
import time
from dataclasses import replace

import psutil
import pytest

from slime_core import OptionError
from slime_tool_python import sandbox
from slime_tool_python.sandbox import CodeError, Limits, missing_protection, require_protection, run_code

LIMITS = Limits(timeout_s=20, memory_mib=512, disk_mib=16, max_processes=8, max_output_characters=2000)
PATIENCE_S = (1.5, 6, 24)
"""Limits of time: each for a busy machine that had not begun under the one before."""

pytestmark = pytest.mark.skipif(missing_protection() is not None, reason=str(missing_protection()))


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    """After every test: no process of it lives, and its directories are gone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    deadline = time.monotonic() + 10
    while left := [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("slime-tool-python-")] == []


async def failure(code: str, limits: Limits = LIMITS, **options) -> str:
    with pytest.raises(CodeError) as error:
        await run_code(code, limits, **options)
    return str(error.value)


# --- what code may do -------------------------------------------------------------------------------------------------
async def test_what_code_prints_comes_back():
    assert await run_code("import sys\nprint(6 * 7)\nprint('é', file=sys.stderr)", LIMITS) == "42\né"


async def test_an_error_is_told_as_python_tells_it():
    said = await failure("print('first')\n1 / 0")
    assert said.startswith("first\nTraceback")
    assert said.endswith("ZeroDivisionError: division by zero")
    assert 'File "code.py", line 2' in said


async def test_code_may_use_files_of_its_own_threads_and_installed_libraries():
    code = """
import concurrent.futures, subprocess, tempfile
import numpy
with tempfile.TemporaryFile() as file:
    file.write(b"kept")
    file.seek(0)
    print(file.read().decode())
print(list(concurrent.futures.ThreadPoolExecutor(2).map(int, "12")), numpy.arange(3).sum())
print(subprocess.run(["/bin/echo", "child"], capture_output=True, text=True).stdout.strip())
"""
    assert await run_code(code, LIMITS) == "kept\n[1, 2] 3\nchild"


async def test_runs_know_nothing_of_each_other():
    await run_code("open('note', 'w').write('x')", LIMITS)
    assert "FileNotFoundError" in await failure("open('note')")


@pytest.mark.parametrize("code", ["import sys; sys.exit(3)", "import os; os._exit(3)"])
async def test_an_exit_code_is_a_failure(code):
    assert await failure(code) == "it exited with code 3"


async def test_text_that_is_no_unicode_is_an_error_of_the_code():
    assert "SyntaxError" in await failure("x = '\ud800'")


# --- escapes: files ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "attempt",
    [
        "open('/etc/passwd').read()",
        "open('/proc/1/environ').read()",
        "open(VICTIM).read()",
        "open(VICTIM, 'w').write('x')",
        "os.listdir(os.path.dirname(VICTIM))",
        "os.remove(VICTIM)",
        "os.rename(VICTIM, 'mine')",
        "os.link(VICTIM, 'mine')",
        "os.symlink(VICTIM, 'mine'); open('mine').read()",
        "os.truncate(VICTIM, 0)",
        "os.chmod(VICTIM, 0o777)",
        "os.chown(VICTIM, 1, 1)",
        "os.utime(VICTIM, (0, 0))",
        "os.setxattr(VICTIM, 'user.x', b'1')",
        "os.mkdir(VICTIM + '-new')",
        "open('/dev/shm/escape', 'w')",
        "os.chroot('.')",
        "os.mkfifo('/tmp/slime-escape-fifo')",
        "__import__('shutil').rmtree(os.path.dirname(VICTIM))",
        "time.clock_settime(time.CLOCK_REALTIME, 0)",
        "__import__('socket').sethostname('mine')",
    ],
)
async def test_other_files_and_the_machine_are_out_of_reach(attempt, tmp_path):
    victim = tmp_path / "outside" / "victim"
    victim.parent.mkdir()
    victim.write_text("secret")
    before = victim.stat()
    said = await failure(f"import os, time\nVICTIM = {str(victim)!r}\n{attempt}\nprint('escaped')")
    assert "escaped" not in said
    assert "PermissionError" in said or "Invalid cross-device link" in said
    after = victim.stat()
    assert victim.read_text() == "secret"
    assert (after.st_mode, after.st_uid, after.st_mtime, after.st_nlink) == (
        before.st_mode,
        before.st_uid,
        before.st_mtime,
        before.st_nlink,
    )


async def test_the_environment_is_empty_of_secrets(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "secret")
    assert "secret" not in await run_code("import os; print(dict(os.environ))", LIMITS)


async def test_open_files_of_the_run_are_not_inherited(tmp_path):
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        code = "import os\nfor fd in range(3, 256):\n    try: os.fstat(fd); print(fd, 'open')\n    except OSError: pass"
        assert await run_code(code, LIMITS) == ""


# --- escapes: network and other processes -----------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["AF_INET", "AF_INET6"])
async def test_no_connection_gets_out(kind):
    address = "127.0.0.1" if kind == "AF_INET" else "::1"
    with socket.socket(getattr(socket, kind)) as server:
        server.bind((address, 0))
        server.listen()
        port = server.getsockname()[1]
        code = f"import socket\ns = socket.socket(socket.{kind})\ns.connect(({address!r}, {port}))\nprint('escaped')"
        assert "PermissionError" in await failure(code)


async def test_no_datagram_gets_out():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(0.2)
        code = (
            "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
            f"s.sendto(b'x', ('127.0.0.1', {server.getsockname()[1]}))\nprint('escaped')"
        )
        assert "escaped" not in await failure(code)
        with pytest.raises(TimeoutError):
            server.recv(1)


@pytest.mark.parametrize("abstract", [False, True])
async def test_no_local_service_is_reached(tmp_path, abstract):
    name = f"\0slime-{os.getpid()}" if abstract else str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        code = f"import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect({name!r})\nprint('escaped')"
        assert "escaped" not in await failure(code)


async def test_no_server_can_be_opened():
    assert "escaped" not in await failure(
        "import socket\ns = socket.socket()\ns.bind(('127.0.0.1', 0))\ns.listen()\nprint('escaped')"
    )


async def test_other_processes_cannot_be_signalled():
    with subprocess.Popen(["sleep", "60"]) as bystander:
        for target in ("os.getppid()", bystander.pid):
            assert "PermissionError" in await failure(f"import os\nos.kill({target}, 15)\nprint('escaped')")
        assert bystander.poll() is None
        bystander.kill()


# --- too much ---------------------------------------------------------------------------------------------------------
async def test_a_fork_bomb_stays_small():
    peak, done, others = 0, threading.Event(), set(psutil.Process().children(recursive=True))

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, sum(map(lives, set(psutil.Process().children(recursive=True)) - others)))
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    try:
        for timeout_s in PATIENCE_S:
            assert f"stopped after {timeout_s:g} s" in await failure(code, replace(LIMITS, timeout_s=timeout_s))
            if peak > 2:
                break
    finally:
        done.set()
        watcher.join()
    assert 2 < peak <= LIMITS.max_processes + 3


def lives(process: psutil.Process) -> bool:
    """Whether it runs: while many are being killed, the dead wait for their parent."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    "code",
    [
        "x = bytearray(2**32)",
        "x = []\nwhile True: x.append('x' * 10**6)",
        "import mmap\nm = mmap.mmap(-1, 2**31)\nfor i in range(0, 2**31, 4096): m[i] = 1",
        "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        x = [b'x' * 10**8 for _ in range(4)]\n"
        "        time.sleep(60)\nos.wait()\nraise MemoryError('of a child')",
    ],
)
async def test_memory_is_bounded(code):
    said = await failure(code)
    assert "MiB of memory" in said or "MemoryError" in said


async def test_memory_that_no_limit_counts_is_refused():
    assert "PermissionError" in await failure("import os\nos.memfd_create('a')")
    memfd_secret = 447
    code = f"import ctypes\nprint(ctypes.CDLL(None, use_errno=True).syscall({memfd_secret}, 0), ctypes.get_errno())"
    assert await run_code(code, LIMITS) == f"-1 {errno.EPERM}"


async def test_threads_without_end_are_bounded():
    code = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    said = await failure(code)
    assert "MiB of memory" in said or "can't start new thread" in said


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)", "import signal\nsignal.pause()"])
async def test_time_is_bounded_and_what_was_printed_is_kept(code):
    for timeout_s in PATIENCE_S:
        said = await failure(f"print('begun')\n{code}", replace(LIMITS, timeout_s=timeout_s))
        if said.startswith("begun"):
            break
    assert said == f"begun\nit was stopped after {timeout_s:g} s"


async def test_code_that_ignores_signals_and_leaves_children_is_gone_all_the_same():
    code = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
print("left")
sys.stdout.flush()
os._exit(0)
"""
    assert "left" in await run_code(code, LIMITS)


async def test_output_is_bounded():
    said = await failure("while True: print('x' * 100_000)")
    assert len(said) < 2 * LIMITS.max_output_characters
    assert "it printed far more than 2000 characters" in said


async def test_long_output_is_shown_without_its_middle():
    said = await run_code("print('a' * 2000 + 'b' * 2000)", LIMITS)
    assert said == f"{'a' * 1000}\n... 2000 characters left out ...\n{'b' * 1000}"


@pytest.mark.parametrize(
    "code",
    [
        "f = open('big', 'wb')\nwhile True: f.write(b'x' * 10**6)",
        "n = 0\nwhile True:\n    open(str(n), 'wb').write(b'x' * 10**6)\n    n += 1",
        "n = 0\nwhile True:\n    open(str(n), 'w').close()\n    n += 1",
        "import os\nwhile True:\n    os.mkdir('d' * 100)\n    os.chdir('d' * 100)",
    ],
)
async def test_disk_is_bounded(code):
    said = await failure(code)
    assert "wrote more than 16 MiB" in said or "File too large" in said


WITHOUT_A_NAME = """
import ctypes, mmap, os, socket, time
libc = ctypes.CDLL(None)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_size_t] * 5]
kept, (one_end, other_end) = [], socket.socketpair()
{first}
for _ in range(64):
    file = os.open("f", os.O_RDWR | os.O_CREAT)
    os.unlink("f")
    os.write(file, b"x" * 2**20)
    {keep}
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("first", "keep"),
    [
        ("", "kept.append(file)"),
        ("libc.prctl(4, 0)  # no core dump, and no look at its files", "kept.append(file)"),
        ("", "libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_SHARED, file, 0); os.close(file)"),
        ("", "socket.send_fds(one_end, [b'x'], [file]); os.close(file)"),
        ("", "kept.append(file)\n    if len(kept) == 8 and os.fork(): time.sleep(60)"),
    ],
    ids=["open", "hidden", "mapped", "sent", "forked"],
)
async def test_files_that_were_deleted_and_are_kept_count(first, keep):
    assert "wrote more than 16 MiB" in await failure(WITHOUT_A_NAME.format(first=first, keep=keep))


async def test_files_without_a_name_may_be_used_within_the_limit():
    code = """
import mmap, tempfile, time
with tempfile.TemporaryFile() as file:
    file.truncate(2**20)
    shared = mmap.mmap(file.fileno(), 2**20)
shared[:] = b"x" * 2**20
time.sleep(0.5)
print(shared[:3].decode())
"""
    assert await run_code(code, LIMITS) == "xxx"


# --- the harness ------------------------------------------------------------------------------------------------------
async def test_a_cancelled_run_is_killed():
    before = set(psutil.Process().children())  # of other tests
    task = asyncio.create_task(run_code("import time\nprint(1, flush=True)\ntime.sleep(60)", LIMITS))
    while set(psutil.Process().children()) <= before:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert set(psutil.Process().children()) <= before


def leads_a_session(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid) == pid
    return False


async def test_a_jail_that_stands_still_takes_everything_with_it(monkeypatch):
    monkeypatch.setattr(sandbox, "ENDING_S", 0.3)
    before = set(psutil.Process().children())
    task = asyncio.create_task(run_code("import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(1000)", LIMITS))

    def jailed() -> psutil.Process | None:
        """The jail, once code in it leads a session of its own."""
        for found in set(psutil.Process().children()) - before:
            if any(leads_a_session(process.pid) for process in found.children(recursive=True)):
                return found
        return None

    async with asyncio.timeout(LIMITS.timeout_s):
        while (jail := jailed()) is None:
            await asyncio.sleep(0.01)
    jail.suspend()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(30):
            await task
    assert not jail.is_running()  # of the others `nothing_left` knows


async def test_runs_go_side_by_side():
    said = await asyncio.gather(*(run_code(f"print({i})", LIMITS) for i in range(8)))
    assert said == [str(i) for i in range(8)]


async def test_the_sandbox_is_tried_before_it_is_trusted(monkeypatch):
    plain, tried = sandbox.run_code, []

    async def noting(code, limits):
        tried.append(await plain(code, limits))
        return tried[-1]

    monkeypatch.setattr(sandbox, "run_code", noting)
    await require_protection(LIMITS)
    assert tried, "code ran in the sandbox before it was trusted"


async def test_a_system_without_protection_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox, "missing_protection", lambda: "this kernel has no Landlock")
    with pytest.raises(OptionError, match=r"this kernel has no Landlock.*--tool-python-unsafe"):
        await require_protection(LIMITS)


async def test_a_sandbox_that_does_not_hold_is_refused(monkeypatch):
    plain = sandbox.run_code
    monkeypatch.setattr(sandbox, "run_code", lambda code, limits: plain(code, limits, unsafe=True))
    with pytest.raises(OptionError, match="a trial run in the sandbox gave"):
        await require_protection(LIMITS)


# --- without the sandbox ----------------------------------------------------------------------------------------------
async def test_without_the_sandbox_time_memory_and_output_are_still_bounded():
    assert await run_code("print(1)", LIMITS, unsafe=True) == "1"
    assert "stopped after 1.5 s" in await failure("while True: pass", replace(LIMITS, timeout_s=1.5), unsafe=True)
    assert "MemoryError" in await failure("x = bytearray(2**32)", LIMITS, unsafe=True)
    assert "far more than" in await failure("while True: print('x' * 100_000)", LIMITS, unsafe=True)
