"""Weights and training state on disk, in formats that hold no code."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from slime_core.errors import CheckpointError
from slime_core.training.torch_backend.pretrained import from_pretrained

MODEL, TRAINER = "model", "trainer"
"""The two directories of a checkpoint."""

TOKENIZER_FILES = (
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


def save_model(model: PreTrainedModel, source: Path, directory: Path) -> None:
    """Write a directory that transformers loads: config, weights, and the tokenizer's files copied from `source`."""
    target = directory / MODEL
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    copy_files(source, target, TOKENIZER_FILES)


def copy_files(source: Path, target: Path, patterns: Sequence[str]) -> None:
    """Copy what lies beside a model's weights, but for what the target has."""
    for pattern in patterns:
        for path in source.glob(pattern):
            copy = shutil.copytree if path.is_dir() else shutil.copy2
            if not (target / path.name).exists():
                copy(path, target / path.name)


def load_model(model: PreTrainedModel, directory: Path) -> None:
    """Copy the weights of `directory/model` into the model's own tensors, which an optimiser may hold.

    Raises:
        CheckpointError: when they are missing or of another model.
    """
    source = directory / MODEL
    try:
        saved = from_pretrained(str(source), model.dtype).state_dict()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's model {source} cannot be loaded: {error}") from None
    own = model.state_dict()
    if {n: t.shape for n, t in saved.items()} != {n: t.shape for n, t in own.items()}:
        raise CheckpointError(f"the checkpoint's model {source} is another than --model; resume with the same --model.")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def save_state(state: dict[str, Any], directory: Path, name: str) -> None:
    """Write tensors and plain values to `directory/trainer/NAME.pt`."""
    path = directory / TRAINER / f"{name}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)


def load_state(directory: Path, name: str, device: torch.device) -> dict[str, Any]:
    """What `save_state` wrote.

    Raises:
        CheckpointError: when the file is missing or holds anything but tensors and plain values.
    """
    path = directory / TRAINER / f"{name}.pt"
    if not path.is_file():
        raise CheckpointError(f"the checkpoint has no {path}.")
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
    return state
