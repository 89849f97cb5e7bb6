"""Rows of a prompt file as samples: JSONL with an index of row offsets, so that the file may be larger than memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from slime_core.errors import DataError
from slime_core.options import Options
from slime_core.types import IntArray, Sample


@dataclass(frozen=True)
class PromptFile:
    """A JSONL file of prompts whose rows have all been checked."""

    path: Path
    offsets: IntArray
    """int64, where each good row begins."""
    line_numbers: IntArray
    """int64, counted from 1."""
    num_bad_rows: int

    def __len__(self) -> int:
        return len(self.offsets)

    def sample(self, args: Options, row: int, dataset: str = "train") -> Sample:
        """Row `row` as a sample."""
        with self.path.open("rb") as file:
            file.seek(int(self.offsets[row]))
            return row_to_sample(args, file.readline(), f"{self.path}, line {self.line_numbers[row]}", dataset)


def open_prompt_file(args: Options, path: str) -> PromptFile:
    """Read the file once: check every row and note where it begins.

    Raises:
        DataError: naming file and line of the first bad row (with `--skip-bad-rows` it is counted instead), or when
            no good row is there.
    """
    offsets, numbers, num_bad = [], [], 0
    for number, offset, line in _lines(Path(path)):
        try:
            row_to_sample(args, line, f"{path}, line {number}")
        except DataError:
            if not args.skip_bad_rows:
                raise
            num_bad += 1
            continue
        offsets.append(offset)
        numbers.append(number)
    if not offsets:
        raise DataError(f"{path} has no usable row ({num_bad} bad ones); every prompt data file needs at least one.")
    return PromptFile(Path(path), np.array(offsets, np.int64), np.array(numbers, np.int64), num_bad)


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and content of every line that is not blank."""
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, offset, line
            offset += len(line)


def row_to_sample(args: Options, line: bytes, where: str, dataset: str = "train") -> Sample:
    """Parse one JSONL row.

    Raises:
        DataError: naming the row and what is wrong with it.
    """
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(
            f"{where}: not valid JSON ({error}); fix the row, or count such rows with --skip-bad-rows."
        ) from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row must be a JSON object, this one is {_kind(row)}.")
    prompt = _field(row, args.input_key, "--input-key", where)
    if not isinstance(prompt, str) and not _is_messages(prompt):
        raise DataError(
            f"{where}: '{args.input_key}' must be text or a list of chat messages with 'role' and 'content'; "
            f"it is {_kind(prompt)}."
        )
    label = row.get("label") if args.label_key is None else _field(row, args.label_key, "--label-key", where)
    metadata = row.get(args.metadata_key) or {}
    if not isinstance(metadata, dict):
        raise DataError(f"{where}: '{args.metadata_key}' must be a JSON object, it is {_kind(metadata)}.")
    if tools := row.get(args.tool_key):
        metadata = {**metadata, "tools": tools}
    return Sample(prompt=prompt, label=label, metadata=metadata, dataset=dataset)


def _field(row: dict[str, Any], key: str, flag: str, where: str) -> Any:
    if key not in row:
        fields = ", ".join(map(repr, row)) or "none"
        raise DataError(f"{where}: there is no field '{key}'; the row has {fields}. Name the right one with {flag}.")
    return row[key]


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
