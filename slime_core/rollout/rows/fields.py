"""What a row must hold: its fields by the keys that the flags name, checked, as a sample."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from slime_core.errors import DataError
from slime_core.options import Options
from slime_core.rollout.rows.images import ImageSource, data_uri, image_source, place_images
from slime_core.types import Sample

Prompt = str | list[dict[str, Any]]


class Fields(NamedTuple):
    """The parts of a row that passed every check; images are not read yet."""

    prompt: Prompt
    label: Any
    metadata: dict[str, Any]
    sampling_params: dict[str, Any]
    images: list[ImageSource]

    def sample(self, where: str, dataset: str) -> Sample:
        """The row as a sample, its images as data URIs.

        Raises:
            DataError: when an image cannot be read.
        """
        return Sample(
            prompt=self.prompt,
            label=self.label,
            metadata=self.metadata,
            sampling_params=self.sampling_params,
            multimodal={"image": [data_uri(image, where) for image in self.images]} if self.images else None,
            dataset=dataset,
            origin=where,
        )


_LONG_NUMBER = re.compile(rb"\d{19}")
"""Where whole numbers may not fit 64 bits."""


def parse_json_row(line: bytes, where: str, exact: bool = True) -> dict[str, Any]:
    """The object on a line of JSONL.

    Args:
        exact: whole numbers beyond 64 bits become text; otherwise they lose digits, which a check does not mind.

    Raises:
        DataError: naming the line, when it holds anything else.
    """
    try:
        row = orjson.loads(line)
        if exact and _LONG_NUMBER.search(line):
            row = json.loads(line, parse_int=_whole_number)
    except orjson.JSONDecodeError as error:
        raise DataError(
            f"{where}: not valid JSON ({error}); fix the row, or count such rows with --skip-bad-rows."
        ) from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row must be a JSON object, this one is {_kind(row)}.")
    return row


def _whole_number(digits: str) -> int | str:
    """Neither orjson nor a checkpoint holds more than 64 bits; what compares labels compares their text."""
    number = int(digits) if len(digits) <= 20 else None
    return digits if number is None or not -(2**63) <= number < 2**64 else number


def check_row(args: Options, row: dict[str, Any], where: str, folder: Path) -> Fields:
    """The fields of a row; `folder` is where relative image paths begin.

    Raises:
        DataError: naming the row and what is wrong with it.
    """
    prompt = _field(row, args.input_key, "--input-key", where)
    has_parts = _check_prompt(prompt, args.input_key, where)
    images: list[ImageSource] = []
    if has_parts or args.multimodal_keys:
        prompt, images = _images(args, row, prompt, where, folder)
    label = row.get("label") if args.label_key is None else _field(row, args.label_key, "--label-key", where)
    metadata = _object(row, args.metadata_key, "--metadata-key", where)
    if tools := _tools(row, args.tool_key, where):
        metadata = {**metadata, "tools": tools}
    if params := _object(row, args.sampling_params_key, "--sampling-params-key", where):
        _check_sampling_params(params, args.sampling_params_key, where)
    return Fields(prompt, label, metadata, params, images)


# --- fields -----------------------------------------------------------------------------------------------------------
_MISSING = object()


def _found(row: dict[str, Any], key: str, default: Any) -> Any:
    """The field `key`, or, for a key with dots, the one inside objects: `reward_model.ground_truth`."""
    if key in row:
        return row[key]
    value: Any = row if "." in key else default
    for part in key.split(".") if "." in key else ():
        if not isinstance(value, dict) or part not in value:
            return default
        value = value[part]
    return value


def _field(row: dict[str, Any], key: str, flag: str, where: str) -> Any:
    value = _found(row, key, _MISSING)
    if value is _MISSING:
        fields = ", ".join(map(repr, row)) or "none"
        raise DataError(f"{where}: there is no field '{key}'; the row has {fields}. Name the right one with {flag}.")
    return value


def _parsed(row: dict[str, Any], key: str, flag: str, where: str) -> Any:
    """The field `key`, out of its JSON if it is text; None where it is missing or empty."""
    value = _found(row, key, None)
    if not isinstance(value, str):
        return value or None
    try:
        return orjson.loads(value) if value.strip() else None
    except orjson.JSONDecodeError as error:
        raise DataError(
            f"{where}: '{key}' is text but not valid JSON ({error}); if it means something else, name another field "
            f"with {flag}."
        ) from None


def _object(row: dict[str, Any], key: str, flag: str, where: str) -> dict[str, Any]:
    value = _parsed(row, key, flag, where)
    if value is not None and not isinstance(value, dict):
        raise DataError(
            f"{where}: '{key}' must be a JSON object, as it is or as text; it is {_kind(value)}. Name another field "
            f"with {flag}."
        )
    return value or {}


def _tools(row: dict[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    value = _parsed(row, key, "--tool-key", where)
    if value is not None and not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        raise DataError(
            f"{where}: '{key}' must be a list of objects, one a tool; it is {_kind(value)}. Name another field with "
            "--tool-key."
        )
    return value or []


def _images(
    args: Options, row: dict[str, Any], prompt: Prompt, where: str, folder: Path
) -> tuple[Prompt, list[ImageSource]]:
    """The prompt with the places of its images, and the images."""
    given = _found(row, args.multimodal_keys[0].key, None) if args.multimodal_keys else None
    values = given if isinstance(given, list) else [] if given is None else [given]
    return place_images(
        prompt,
        [image_source(value, folder, where) for value in values],
        folder=folder,
        as_messages=args.apply_chat_template,
        split_text=bool(args.multimodal_keys),
        where=where,
    )


# --- prompts ----------------------------------------------------------------------------------------------------------
def _check_prompt(prompt: Any, key: str, where: str) -> bool:
    """Refuse what is no prompt; whether a message has a content of parts."""
    if isinstance(prompt, str):
        if not prompt:
            raise DataError(f"{where}: '{key}' is empty; a prompt needs at least one token.")
        return False
    if not isinstance(prompt, list) or not prompt:
        what = "an empty list" if prompt == [] else _kind(prompt)
        raise DataError(
            f"{where}: '{key}' must be text or a list of chat messages with 'role' and 'content'; it is {what}."
        )
    says_something = has_parts = False
    for number, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
            raise DataError(
                f"{where}: message {number} of '{key}' has no 'role'; '{key}' must be text or a list of chat messages "
                "with 'role' and 'content'."
            )
        content = message.get("content")
        if isinstance(content, str):
            says_something = says_something or bool(content)
        elif _is_parts(content):
            says_something = has_parts = True
        elif content is None and message.get("tool_calls"):
            says_something = True
        else:
            what = "missing" if content is None else _kind(content)
            raise DataError(
                f"{where}: message {number} of '{key}' needs text or a list of typed parts as 'content'; it is {what}."
            )
    if not says_something:
        raise DataError(f"{where}: every message of '{key}' is empty; a prompt must say something.")
    return has_parts


def _is_parts(content: Any) -> bool:
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content)
    )


# --- sampling parameters ----------------------------------------------------------------------------------------------
def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_SAMPLING_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("a number of at least 0", lambda v: _is_number(v) and v >= 0),
    "top_p": ("a number above 0 and up to 1", lambda v: _is_number(v) and 0 < v <= 1),
    "min_p": ("a number from 0 to 1", lambda v: _is_number(v) and 0 <= v <= 1),
    "top_k": ("-1 or a whole number of at least 1", lambda v: _is_whole(v) and (v == -1 or v >= 1)),
    "max_new_tokens": ("a whole number of at least 1", lambda v: _is_whole(v) and v >= 1),
    "stop": ("text or a list of texts", lambda v: isinstance(v, str) or _all(v, lambda x: isinstance(x, str))),
    "stop_token_ids": ("a list of whole numbers", lambda v: _all(v, _is_whole)),
    "n": ("left out (--n-samples-per-prompt sets it)", lambda v: False),
}
"""Sampling parameter -> what it must be, and whether a value is; what stands not here is the engine's to judge."""


def _all(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(fits(item) for item in value)


def _check_sampling_params(params: dict[str, Any], key: str, where: str) -> None:
    for name, value in params.items():
        if name in _SAMPLING_RULES and not _SAMPLING_RULES[name][1](value):
            raise DataError(f"{where}: '{name}' in '{key}' must be {_SAMPLING_RULES[name][0]}; it is {value!r}.")


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null", bytes: "bytes"}
    return kinds.get(type(value), "a number")
