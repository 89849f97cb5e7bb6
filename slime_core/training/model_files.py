"""Where a checkpoint has the training state, and what lies beside a model's weights."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

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
