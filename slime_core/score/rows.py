"""Rows with responses as finished samples, one group a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from slime_core.errors import DataError
from slime_core.options import Options
from slime_core.types import Group, Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Row:
    """The responses of one line, and the rewards that the line itself gives them."""

    number: int
    """Of the line, counted from 1."""
    samples: Group
    given: list[float | None]
    """A sample each; None where the line gives none."""


def read_rows(
    args: Options, path: str, response_key: str, compare: str | None, limit: int | None, note_bad: Callable[[], None]
) -> Iterator[Row]:
    """The file's rows, one at a time.

    Raises:
        DataError: naming file and line of a bad row; with `--skip-bad-rows` it goes to `note_bad` instead.
    """
    tokenizer = _tokenizer(args)
    read = 0
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if limit is not None and read == limit:
                return
            try:
                row = _row(args, line, number, f"{path}, line {number}", response_key, compare, tokenizer)
            except DataError:
                if not args.skip_bad_rows:
                    raise
                note_bad()
                continue
            read += 1
            yield row


def _row(
    args: Options,
    line: bytes,
    number: int,
    where: str,
    response_key: str,
    compare: str | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Row:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(
            f"{where}: not valid JSON ({error}); fix the row, or count such rows with --skip-bad-rows."
        ) from None
    if not isinstance(fields, dict):
        raise DataError(f"{where}: a row must be a JSON object.")
    samples = _samples(args, fields, where, response_key, tokenizer)
    for position, sample in enumerate(samples):
        sample.index = sample.rollout_index = 1_000 * number + position
        sample.group_index = number
    return Row(number, samples, _given(fields, where, compare, len(samples)))


def _samples(
    args: Options, fields: dict[str, Any], where: str, response_key: str, tokenizer: PreTrainedTokenizerBase | None
) -> Group:
    if response_key not in fields:
        raise DataError(
            f"{where}: there is no field '{response_key}'; the row has {', '.join(map(repr, fields)) or 'none'}. "
            "Name the one with the response with --response-key."
        )
    responses = fields[response_key] if isinstance(fields[response_key], list) else [fields[response_key]]
    if not responses or not all(isinstance(response, str) for response in responses):
        raise DataError(f"{where}: '{response_key}' must be a text or a list of texts.")
    if args.label_key is not None and args.label_key not in fields:
        raise DataError(f"{where}: there is no field '{args.label_key}', which --label-key names.")
    metadata = fields.get(args.metadata_key) or {}
    if not isinstance(metadata, dict):
        raise DataError(f"{where}: '{args.metadata_key}' must be a JSON object.")
    prompt = fields.get(args.input_key) or ""
    label = fields.get(args.label_key or "label")
    status = Status.TRUNCATED if fields.get("status") == Status.TRUNCATED else Status.COMPLETED
    return [_sample(prompt, label, metadata, response, status, tokenizer).clone() for response in responses]


def _sample(
    prompt: Any,
    label: Any,
    metadata: dict[str, Any],
    response: str,
    status: Status,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Sample:
    sample = Sample(prompt=prompt, label=label, metadata=metadata, dataset="score")
    if tokenizer is None:
        tokens = np.zeros(len(response.split()), np.int32)
    else:
        tokens = np.asarray(tokenizer.encode(response, add_special_tokens=False), np.int32)
    sample.append(tokens, text=response)
    sample.status = status
    return sample


def _given(fields: dict[str, Any], where: str, compare: str | None, count: int) -> list[float | None]:
    if compare is None:
        return [None] * count
    metadata = fields.get("metadata")
    source = fields if compare in fields or not isinstance(metadata, dict) else metadata
    value = source.get(compare)
    values = value if isinstance(value, list) else [value]
    if len(values) != count or not all(v is None or isinstance(v, bool | int | float) for v in values):
        raise DataError(
            f"{where}: '{compare}', which --compare names, must hold a number for each of {count} responses."
        )
    return [None if v is None else float(v) for v in values]


def _tokenizer(args: Options) -> PreTrainedTokenizerBase | None:
    if args.model is None:
        return None
    from slime_core.engines.model_dir import load_tokenizer

    return load_tokenizer(args.model)
