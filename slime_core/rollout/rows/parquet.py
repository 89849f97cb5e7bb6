"""Rows of a Parquet file, one row group in memory at a time, or as many as the shuffling window holds."""

from __future__ import annotations

import datetime
import decimal
import uuid
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from slime_core.errors import DataError
from slime_core.options import DataFile, Options
from slime_core.rollout.rows.order import WINDOW_BYTES, Blocks
from slime_core.types import IntArray

CHECKED_ROWS = 1024
"""Rows turned into Python objects at a time while a file is checked."""


class Check(Protocol):
    """What the format asks about every row."""

    def keeps(self, row: dict[str, Any], where: str) -> bool: ...


class GroupCache:
    """The row groups read last, up to `window_bytes` of them or one; the order of an epoch never needs more."""

    def __init__(self, window_bytes: int = WINDOW_BYTES) -> None:
        self.window_bytes = window_bytes
        self._groups: OrderedDict[tuple[Path, int], tuple[pa.Table, int]] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        """Row groups held."""
        return len(self._groups)

    def get(self, key: tuple[Path, int], num_bytes: int, read: Callable[[], pa.Table]) -> pa.Table:
        """The group under `key`, read if it is not there."""
        if key in self._groups:
            self._groups.move_to_end(key)
            return self._groups[key][0]
        while self._groups and self._num_bytes + num_bytes > self.window_bytes:
            self._num_bytes -= self._groups.popitem(last=False)[1][1]
        table = read()
        self._groups[key] = (table, num_bytes)
        self._num_bytes += num_bytes
        return table


@dataclass(frozen=True)
class ParquetRows:
    """The good rows of the slice; the file stays open."""

    path: Path
    file: pq.ParquetFile
    columns: list[str]
    file_rows: IntArray
    """int64 [rows], the number of each good row in the file, from 0."""
    group_ends: IntArray
    """int64 [row groups], rows of the file up to and with each group."""
    group_bytes: IntArray
    """int64 [row groups], of the columns read, as the file states them."""
    checksum: str
    cache: GroupCache

    def __len__(self) -> int:
        return len(self.file_rows)

    @property
    def blocks(self) -> Blocks:
        """One a row group that has good rows."""
        groups, num_rows = np.unique(self._groups(self.file_rows), return_counts=True)
        return Blocks(num_rows, self.group_bytes[groups])

    def where(self, row: int) -> str:
        """Path and number of the row in the file, counted from 0 as slices count."""
        return _where(self.path, int(self.file_rows[row]))

    def read(self, row: int) -> dict[str, Any]:
        """The row's fields.

        Raises:
            DataError: when the file was rewritten since it was opened.
        """
        file_row = int(self.file_rows[row])
        group = int(self._groups(np.array(file_row)))
        try:
            table = self.cache.get(
                (self.path, group),
                int(self.group_bytes[group]),
                lambda: self.file.read_row_group(group, columns=self.columns),
            )
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{self.where(row)}: row group {group} cannot be read ({error}); has the file changed since the run "
                "opened it?"
            ) from None
        within = file_row - (int(self.group_ends[group - 1]) if group else 0)
        return _rows(table.slice(within, 1))[0]

    def _groups(self, file_rows: IntArray) -> IntArray:
        return np.searchsorted(self.group_ends, file_rows, side="right")


def open_rows(args: Options, file: DataFile, check: Check, cache: GroupCache) -> ParquetRows:
    """Check the rows of the slice, group after group, and note which are good.

    Raises:
        DataError: also when a column that a flag names is not there.
    """
    parquet = _open(file)
    columns = _columns(args, parquet.schema_arrow, file.path)
    start, stop, _ = slice(file.start, file.stop).indices(parquet.metadata.num_rows)
    group_rows = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
    good, first = array("q"), 0
    for group, num_rows in enumerate(group_rows):
        low, high = max(start - first, 0), min(stop - first, num_rows)
        if low < high:
            table = _read_group(parquet, group, columns, file.path).slice(low, high - low)
            for begin in range(0, len(table), CHECKED_ROWS):
                for number, row in enumerate(_rows(table.slice(begin, CHECKED_ROWS)), start=first + low + begin):
                    if check.keeps(row, _where(file.path, number)):
                        good.append(number)
        first += num_rows
    return ParquetRows(
        Path(file.path),
        parquet,
        columns,
        np.array(good, np.int64),
        np.cumsum(group_rows, dtype=np.int64),
        np.array([_bytes(parquet, group, columns) for group in range(len(group_rows))], np.int64),
        _footer_checksum(file.path),
        cache,
    )


def num_rows(file: DataFile) -> int:
    """Rows of the slice, good and bad."""
    return len(range(*slice(file.start, file.stop).indices(_open(file).metadata.num_rows)))


def _open(file: DataFile) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file.path)
    except pa.ArrowException as error:
        raise DataError(f"{file.path} is not a Parquet file: {error}") from None


def _read_group(parquet: pq.ParquetFile, group: int, columns: list[str], path: str) -> pa.Table:
    try:
        return parquet.read_row_group(group, columns=columns)
    except pa.ArrowException as error:
        raise DataError(f"{path}: row group {group} cannot be read: {error}") from None


def _columns(args: Options, schema: pa.Schema, path: str) -> list[str]:
    """The columns that the flags name; the others are never read."""
    needed = {args.input_key: "--input-key"} | ({args.label_key: "--label-key"} if args.label_key else {})
    for key, flag in needed.items():
        if _column(key, schema) is None:
            names = ", ".join(map(repr, schema.names)) or "none"
            raise DataError(f"{path}: there is no column '{key}', only {names}. Name the right one with {flag}.")
    images = [entry.key for entry in args.multimodal_keys]
    wanted = [*needed, *images, "label", args.metadata_key, args.tool_key, args.sampling_params_key]
    columns = [_column(key, schema) for key in wanted]
    return list(dict.fromkeys(column for column in columns if column is not None))


def _column(key: str, schema: pa.Schema) -> str | None:
    """The column that holds a field, which for a key with dots may be one of objects."""
    return next((name for name in (key, key.split(".")[0]) if name in schema.names), None)


def _bytes(parquet: pq.ParquetFile, group: int, columns: list[str]) -> int:
    """Uncompressed bytes of the columns in a row group."""
    metadata = parquet.metadata.row_group(group)
    parts = [metadata.column(i) for i in range(metadata.num_columns)]
    return sum(
        part.total_uncompressed_size
        for part in parts
        if any(part.path_in_schema == name or part.path_in_schema.startswith(f"{name}.") for name in columns)
    )


def _footer_checksum(path: str) -> str:
    """Of the file's footer, which holds sizes, places and bounds of all that the file holds."""
    with open(path, "rb") as file:
        file.seek(-8, 2)
        length = int.from_bytes(file.read(4), "little")
        file.seek(-8 - length, 2)
        return xxhash.xxh3_64(file.read(length)).hexdigest()


def _where(path: Path | str, file_row: int) -> str:
    return f"{path}, row {file_row}"


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    return [_plain(row) for row in table.to_pylist()]


def _plain(value: Any) -> Any:
    """What JSON would have given: no null fields in objects (Arrow cannot leave them out), no dates or decimals."""
    if type(value) is dict:
        return {k: v if type(v) in _PLAIN else _plain(v) for k, v in value.items() if v is not None}
    if type(value) is list:
        return [v if type(v) in _PLAIN else _plain(v) for v in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta | uuid.UUID):
        return str(value)
    return value


_PLAIN = {str, int, float, bool}
