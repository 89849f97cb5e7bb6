"""One file of `--prompt-data` or `--eval-data`, opened: every row checked, any row as a sample."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.errors import DataError
from slime_core.options import DataFile, Options, data_file
from slime_core.rollout.rows import jsonl
from slime_core.rollout.rows.fields import check_row, parse_json_row
from slime_core.rollout.rows.order import Blocks
from slime_core.types import Sample

if TYPE_CHECKING:
    from slime_core.rollout.rows.parquet import GroupCache

logger = logging.getLogger(__name__)

PROGRESS_S = 30.0
"""Seconds between two lines of the log while a large file is checked."""


class Rows(Protocol):
    """The good rows of a file in its own format."""

    @property
    def checksum(self) -> str:
        """Of what is read, so that a resumed run knows the data again."""
        ...

    @property
    def blocks(self) -> Blocks:
        """What is read together."""
        ...

    def __len__(self) -> int: ...
    def where(self, row: int) -> str: ...
    def read(self, row: int) -> dict[str, Any]: ...


@dataclass(frozen=True)
class PromptFile:
    """The rows of one file, or of a slice of it, all of them checked."""

    path: Path
    rows: Rows
    num_bad_rows: int
    """Left out under `--skip-bad-rows`."""

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, args: Options, row: int, dataset: str = "train") -> Sample:
        """Row `row` as a sample.

        Raises:
            DataError: when the file changed since it was opened, or an image can no longer be read.
        """
        where = self.rows.where(row)
        return check_row(args, self.rows.read(row), where, self.path.parent).sample(where, dataset)


def open_prompt_file(args: Options, file: DataFile | str, cache: GroupCache | None = None) -> PromptFile:
    """Read the file, or the slice that is asked for, once: check every row, keep where it is.

    Args:
        args: name the fields.
        file: as `--prompt-data` takes it; a text is `PATH` or `PATH@[FROM:TO]`.
        cache: a `GroupCache` that several Parquet files share; by default each has its own.

    Raises:
        DataError: naming file and row of the first bad one (with `--skip-bad-rows` it is counted instead), or when no
            good row is there, or the file cannot be read.
    """
    file = data_file(file) if isinstance(file, str) else file
    check = RowCheck(args, file.path)
    try:
        rows: Rows
        if is_parquet(file):
            from slime_core.rollout.rows import parquet  # only who needs it loads pyarrow

            rows = parquet.open_rows(args, file, check, parquet.GroupCache() if cache is None else cache)
        else:
            rows = jsonl.open_rows(file, check)
    except OSError as error:
        raise DataError(f"{file.path} cannot be read: {error}") from None
    if not len(rows):
        raise DataError(
            f"{file.path}{file.slice_text} has no usable row ({check.num_bad} bad ones); every prompt data file needs "
            "at least one."
        )
    if check.num_bad:
        logger.warning("left out %d bad rows of %s; the first: %s", check.num_bad, file.path, check.first_bad)
    return PromptFile(Path(file.path), rows, check.num_bad)


def open_prompt_files(args: Options, files: list[DataFile]) -> list[PromptFile]:
    """`open_prompt_file` for files that are read together; the memory they take does not grow with their number."""
    if not any(is_parquet(file) for file in files):
        return [open_prompt_file(args, file) for file in files]
    from slime_core.rollout.rows.parquet import GroupCache

    cache = GroupCache()
    return [open_prompt_file(args, file, cache) for file in files]


def count_prompts(args: Options) -> int:
    """Prompts in one epoch of `--prompt-data`: the rows of all its files and slices; 0 without any.

    Bad rows are looked for only under `--skip-bad-rows`, as otherwise none is left out; that reads everything.

    Raises:
        DataError: as `open_prompt_file`.
    """
    if args.skip_bad_rows:
        return sum(len(open_prompt_file(args, file)) for file in args.prompt_data)
    return sum(_num_rows(file) for file in args.prompt_data)


def is_parquet(file: DataFile) -> bool:
    """Whether the file's name says Parquet; every other is JSONL."""
    return Path(file.path).suffix.lower() in (".parquet", ".pq")


def _num_rows(file: DataFile) -> int:
    try:
        if is_parquet(file):
            from slime_core.rollout.rows import parquet

            return parquet.num_rows(file)
        return jsonl.num_rows(file)
    except OSError as error:
        raise DataError(f"{file.path} cannot be read: {error}") from None


class RowCheck:
    """Decides which rows are kept: a bad one stops the run, or is counted under `--skip-bad-rows`."""

    def __init__(self, args: Options, path: str) -> None:
        self._args = args
        self._path = path
        self._folder = Path(path).parent
        self._num_rows = 0
        self._next_report = time.monotonic() + PROGRESS_S
        self.num_bad = 0
        self.first_bad = ""

    def keeps(self, row: bytes | dict[str, Any], where: str) -> bool:
        """Whether the row is good; JSON comes as bytes.

        Raises:
            DataError: for a bad row without `--skip-bad-rows`.
        """
        self._num_rows += 1
        if self._num_rows % 10_000 == 0 and time.monotonic() > self._next_report:
            logger.info("checked %d rows of %s so far", self._num_rows, self._path)
            self._next_report = time.monotonic() + PROGRESS_S
        try:
            parsed = parse_json_row(row, where, exact=False) if isinstance(row, bytes) else row
            check_row(self._args, parsed, where, self._folder)
        except DataError as error:
            if not self._args.skip_bad_rows:
                raise
            self.num_bad += 1
            self.first_bad = self.first_bad or str(error)
            return False
        return True
