"""Rows of a JSONL file by an index of row offsets, so that the file may be larger than memory."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from slime_core.errors import DataError
from slime_core.options import DataFile
from slime_core.rollout.rows.fields import parse_json_row
from slime_core.rollout.rows.order import Blocks
from slime_core.types import IntArray

BLOCK_ROWS = 4096
"""Rows of a block; they mix with the row groups of Parquet files, and cost no memory."""


class Check(Protocol):
    """What the format asks about every row."""

    def keeps(self, row: bytes, where: str) -> bool: ...


@dataclass(frozen=True)
class JsonlRows:
    """The good rows of the slice."""

    path: Path
    offsets: IntArray
    """int64 [rows + 1], where each good row begins, and the last one ends."""
    shift_rows: IntArray
    """int64, the rows from which on line number and row differ by `shifts` (blank, bad or sliced-off lines between)."""
    shifts: IntArray
    checksum: str

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def blocks(self) -> Blocks:
        """Any row may be read at any time."""
        first = np.arange(0, len(self), BLOCK_ROWS, dtype=np.int64)
        return Blocks(np.minimum(BLOCK_ROWS, len(self) - first), np.zeros(len(first), np.int64))

    def where(self, row: int) -> str:
        """Path and line number, counted from 1."""
        return f"{self.path}, line {row + int(self.shifts[np.searchsorted(self.shift_rows, row, side='right') - 1])}"

    def read(self, row: int) -> dict[str, Any]:
        """The row's object.

        Raises:
            DataError: when the file was rewritten since it was opened.
        """
        begin, end = int(self.offsets[row]), int(self.offsets[row + 1])
        before = min(begin, 1)  # the end of the line before
        try:
            with self.path.open("rb", buffering=0) as file:
                content = os.pread(file.fileno(), end - begin + before, begin - before)
        except OSError as error:
            raise DataError(f"{self.where(row)}: the file can no longer be read: {error}") from None
        if len(content) != end - begin + before or (before and content[:1] != b"\n"):
            raise DataError(f"{self.where(row)}: the file changed since the run opened it; a run needs it as it was.")
        return parse_json_row(content[before:].partition(b"\n")[0], self.where(row))


def open_rows(file: DataFile, check: Check) -> JsonlRows:
    """Index the good rows of the slice; what lies after it is not read, unless it counts from the end."""
    offsets, shift_rows, shifts = array("q"), array("q"), array("q")
    digest, end = xxhash.xxh3_64(), 0
    start, stop = _bounds(file)
    for number, offset, line in islice(_lines(file.path), start, stop):
        if not check.keeps(line, f"{file.path}, line {number}"):
            continue
        if not shifts or number - len(offsets) != shifts[-1]:
            shift_rows.append(len(offsets))
            shifts.append(number - len(offsets))
        offsets.append(offset)
        digest.update(line)
        end = offset + len(line)
    offsets.append(end)
    return JsonlRows(
        Path(file.path),
        np.array(offsets, np.int64),
        np.array(shift_rows, np.int64),
        np.array(shifts, np.int64),
        digest.hexdigest(),
    )


def num_rows(file: DataFile) -> int:
    """Rows of the slice, good and bad."""
    start, stop = _bounds(file)
    return sum(1 for _ in islice(_lines(file.path), start, stop))


def _bounds(file: DataFile) -> tuple[int, int | None]:
    """The slice with bounds that `islice` takes; counts the rows only for a negative one."""
    start, stop = file.start or 0, file.stop
    if start >= 0 and (stop is None or stop >= 0):
        return start, stop
    total = sum(1 for _ in _lines(file.path))
    return slice(start, stop).indices(total)[:2]


def _lines(path: str) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and content of every line that is not blank."""
    offset = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                yield number, offset, line
            offset += len(line)
