"""What a run of code holds on disk: the files in its directory, and those that it deleted and keeps in use."""

from __future__ import annotations

import asyncio
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

BLOCK_BYTES = 4096
PERIOD_S = 0.1
Hidden: TypeAlias = tuple[str, int]
"""("process", its id) or ("file", its inode)."""
SENT_FILES = re.compile(r"^scm_fds:\s*[1-9]", re.MULTILINE)
"""What the kernel says of a socket with open files that were sent and not received."""


async def outgrown(directory: Path, most_bytes: int, jail: int) -> None:
    """Return when the processes below `jail` hold more than `most_bytes` in `directory`, or hide what they hold."""
    hidden: set[Hidden] = set()
    while True:
        total, unseen = await asyncio.to_thread(_looked, directory, most_bytes, jail)
        # a process is out of sight while it starts or ends, a file while it is sent or closed, but not for two looks
        if total > most_bytes or hidden & unseen:
            return
        hidden = unseen
        await asyncio.sleep(PERIOD_S)


def _looked(directory: Path, most_bytes: int, jail: int) -> tuple[float, set[Hidden]]:
    deleted, unseen = _deleted_bytes(directory, jail)
    return deleted + _listed_bytes(directory, most_bytes), unseen


def _listed_bytes(directory: Path, most_bytes: int) -> float:
    """Every file counts for at least a block; more than `most_bytes` is not counted to its end."""
    open_directories, total = [str(directory)], 0
    while open_directories and total <= most_bytes:
        try:
            with os.scandir(open_directories.pop()) as entries:
                for entry in entries:
                    try:
                        total += _bytes_of(entry.stat(follow_symlinks=False))
                    except FileNotFoundError:  # gone since; the others still count
                        continue
                    if total > most_bytes:
                        break
                    if entry.is_dir(follow_symlinks=False):
                        open_directories.append(entry.path)
        except FileNotFoundError:
            continue
        except OSError:  # nested too deep for a path
            return math.inf
    return total


def _deleted_bytes(directory: Path, jail: int) -> tuple[int, set[Hidden]]:
    """Bytes of the deleted files in use below the process `jail`, and what does not tell its size.

    That is a process that does not show all its files, and a file that is mapped and not open: Python keeps open what
    it maps.
    """
    held: dict[tuple[int, int], int] = {}
    mapped: set[int] = set()
    unseen: set[Hidden] = set()
    for process in processes_below(jail):
        try:
            files, all_shown = _deleted_and_open(process)
            held |= files
            unseen |= set() if all_shown else {("process", process)}
            mapped |= _deleted_and_mapped(process, directory)
        except PermissionError:
            unseen |= {("process", process)} if _alive(process) else set()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    unseen |= {("file", inode) for inode in mapped - {inode for _, inode in held}}
    return sum(held.values()), unseen


def processes_below(jail: int) -> Iterator[int]:
    """The children of the process `jail`, and theirs."""
    parents = [jail]
    while parents:
        children = _children(parents.pop())
        parents += children
        yield from children


def _children(process: int) -> list[int]:
    children: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            children += map(int, Path(f"/proc/{process}/task/{thread}/children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return children


def _deleted_and_open(process: int) -> tuple[dict[tuple[int, int], int], bool]:
    """(device, inode) -> bytes, and whether that is all: open files may be on their way through a socket."""
    found: dict[tuple[int, int], int] = {}
    all_shown = True
    for descriptor in os.listdir(f"/proc/{process}/fd"):
        try:
            file = os.stat(f"/proc/{process}/fd/{descriptor}")
            if stat.S_ISREG(file.st_mode) and file.st_nlink == 0:
                found[file.st_dev, file.st_ino] = _bytes_of(file)
            elif stat.S_ISSOCK(file.st_mode):
                about = Path(f"/proc/{process}/fdinfo/{descriptor}").read_text()
                all_shown &= SENT_FILES.search(about) is None
        except FileNotFoundError:  # closed since
            continue
    return found, all_shown


def _deleted_and_mapped(process: int, directory: Path) -> set[int]:
    """Inodes. Of device numbers not all file systems tell the same here as `stat` does."""
    lines = Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines()
    deleted = [line for line in lines if line.endswith(" (deleted)") and f"/{directory.name}/" in line]
    return {int(line.split(maxsplit=5)[4]) for line in deleted}


def _alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in (b"Z", b"X")


def _bytes_of(file: os.stat_result) -> int:
    return BLOCK_BYTES + 512 * file.st_blocks
