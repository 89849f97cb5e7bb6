"""Groups of samples in a Parquet file: the waiting ones in a checkpoint, the trained ones for study and replay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from slime_core.errors import DataError
from slime_core.types import Group, Sample, Status

ARRAYS = {"tokens": np.int32, "loss_mask": np.uint8, "logprobs": np.float32, "weight_versions": np.int32}
PLAIN = ("index", "group_index", "rollout_index", "dataset", "response", "status", "reward", "failure", "session_id")
"""Fields with a column of their own type; the others are JSON text."""

LEFT_OUT = ("processed",)
"""Fields that are made again from the others; arrays of images would be many times the file."""

JSON = tuple(f.name for f in fields(Sample) if f.name not in (*ARRAYS, *PLAIN, *LEFT_OUT))
GROUP = "group"
"""The column with the position of a sample's group in the file."""


def write_groups(path: Path, groups: Sequence[Group]) -> None:
    """Write groups, in order; a row a sample, arrays as lists, NaN log-probabilities kept.

    Raises:
        TypeError: when a label or metadata holds what JSON cannot.
    """
    samples = [sample for group in groups for sample in group]
    columns: dict[str, Any] = {GROUP: pa.array([i for i, group in enumerate(groups) for _ in group], pa.int64())}
    for name in PLAIN:
        kind = pa.float64() if name == "reward" else pa.int64() if name.endswith("index") else pa.string()
        columns[name] = pa.array([getattr(sample, name) for sample in samples], kind)
    for name, dtype in ARRAYS.items():
        columns[name] = _list_column([getattr(sample, name) for sample in samples], dtype)
    for name in JSON:
        texts = [orjson.dumps(getattr(s, name), option=orjson.OPT_SERIALIZE_NUMPY).decode() for s in samples]
        columns[name] = pa.array(texts, pa.string())
    pq.write_table(pa.table(columns), path, compression="zstd")


def read_groups(path: Path) -> list[Group]:
    """The groups that `write_groups` wrote.

    Raises:
        DataError: when the file is not there, or is not such a file.
    """
    try:
        table = pq.read_table(path, use_threads=False).combine_chunks()
        numbers = table[GROUP].to_numpy()
        samples = list(_samples(table))
    except (OSError, KeyError, ValueError, TypeError, pa.ArrowException) as error:
        raise DataError(f"{path} is not a file of samples: {type(error).__name__}: {error}") from None
    groups: list[Group] = [[] for _ in range(int(numbers.max()) + 1 if len(numbers) else 0)]
    for number, sample in zip(numbers.tolist(), samples, strict=True):
        groups[number].append(sample)
    return groups


def _list_column(arrays: Sequence[Any], dtype: Any) -> pa.Array:
    ends = np.cumsum([0, *(len(array) for array in arrays)])
    values = np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)
    return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), pa.array(values))


def _samples(table: pa.Table) -> Iterable[Sample]:
    plain = {name: table[name].to_pylist() for name in PLAIN}
    texts = {name: table[name].to_pylist() for name in JSON}
    arrays = {name: _arrays(table[name], dtype) for name, dtype in ARRAYS.items()}
    for row in range(table.num_rows):
        values: dict[str, Any] = {name: column[row] for name, column in plain.items()}
        values |= {name: orjson.loads(column[row]) for name, column in texts.items()}
        sample = Sample(**values, **{name: column[row] for name, column in arrays.items()})
        sample.status = Status(sample.status)
        sample.check()
        yield sample


def _arrays(column: pa.ChunkedArray, dtype: Any) -> list[Any]:
    """A list column as one array a row."""
    rows: list[Any] = []
    for chunk in column.chunks:
        ends = chunk.offsets.to_numpy()
        values = chunk.values.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
        rows += [values[start:end] for start, end in pairwise(ends)]
    return rows
