"""What a processor made of the images of a batch's samples, as arguments of the model's forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from slime_core.types import TrainBatch

PROCESSED = "processed"


def has_images(batch: TrainBatch) -> bool:
    """Whether a sample brings what a processor made."""
    return any(PROCESSED in (entry or {}) for entry in batch.multimodal)


def image_inputs(batch: TrainBatch, device: torch.device) -> dict[str, torch.Tensor]:
    """The arrays of all samples under the processor's names, for tokens as right-padded rows [S, L].

    Token types, [1, prompt length], become [S, L], 0 behind the prompt that was processed. All others count images or
    patches along their first axis and are joined there, sample after sample; where their other axes differ, they are
    filled up with zeros, as processors do it within a sample.
    """
    shape = (batch.num_samples, int(batch.lengths.max()))
    rows: dict[str, torch.Tensor] = {}
    parts: dict[str, list[torch.Tensor]] = {}
    for row, entry in enumerate(batch.multimodal):
        for name, array in (entry or {}).get(PROCESSED, {}).items():
            tensor = torch.as_tensor(array, device=device)
            if name.endswith("token_type_ids"):
                rows.setdefault(name, tensor.new_zeros(shape))[row, : tensor.shape[1]] = tensor[0]
            else:
                parts.setdefault(name, []).append(tensor)
    return rows | {name: _joined(tensors) for name, tensors in parts.items()}


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    sizes = [max(lengths) for lengths in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    return torch.cat([_filled(tensor, sizes) for tensor in tensors])


def _filled(tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    missing: list[Any] = []
    for have, want in zip(reversed(tensor.shape[1:]), reversed(sizes), strict=True):
        missing += [0, want - have]
    return pad(tensor, missing) if any(missing) else tensor
