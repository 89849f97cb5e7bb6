"""Where a checkpoint has the training state, and what lies beside a model's weights."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from slime_core.errors import OptionError

TRAINER = "trainer"
"""The directory of a checkpoint with the training state."""

FILES_BESIDE = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.tiktoken",
    "chat_template*",
    "*processor_config.json",
    "spiece.model",
    "sentencepiece*.model",
)
"""Patterns of what lies beside a model's weights and is copied as it is."""

DESCRIPTION = ("config.json", "generation_config.json", *FILES_BESIDE)
"""Patterns of all that a model directory has but weights."""


def copy_files(source: Path, target: Path, patterns: Sequence[str]) -> None:
    """Copy what lies beside a model's weights, but for what the target has."""
    for pattern in patterns:
        for path in source.glob(pattern):
            copy = shutil.copytree if path.is_dir() else shutil.copy2
            if not (target / path.name).exists():
                copy(path, target / path.name)


def write_dtype(directory: Path, dtype: torch.dtype) -> None:
    """Let the config name the dtype of the weights beside it, which engines take for theirs."""
    path = directory / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    config.pop("torch_dtype", None)
    path.write_text(json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n")


def check_vocabulary(args: argparse.Namespace, flag: str, directory: str | None) -> None:
    """Refuse a model beside the policy whose tokens are others.

    Raises:
        OptionError: naming the flag.
    """
    if directory is not None and _vocabulary(directory) != _vocabulary(args.model):
        raise OptionError(
            f"{flag} {directory} has another vocabulary than --model {args.model}; the same tokens mean the same "
            "only to models that share a tokenizer."
        )


def _vocabulary(directory: str) -> dict[str, int]:
    known: dict[str, int] = AutoTokenizer.from_pretrained(directory, trust_remote_code=False).get_vocab()
    return known
