"""Which place of a packed row predicts each response token."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slime_core.errors import SlimeError
from slime_core.training.batch import TensorBatch
from slime_core.types import IntArray


def predicting(lengths: IntArray, responses: IntArray) -> tuple[IntArray, Any]:
    """For each response token, the place [R] just before it, and whether it starts its sequence."""
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = np.repeat(ends - lengths, responses)
    offsets = np.cumsum(responses, dtype=np.int64) - responses
    within = np.arange(int(responses.sum())) - np.repeat(offsets, responses)
    token = np.repeat(ends - responses, responses) + within
    return token - 1, token == starts


def unpredictable_tokens(batch: TensorBatch, first: Any) -> torch.Tensor | None:
    """[R] the tokens that nothing precedes; None where there are none.

    Args:
        batch: the samples.
        first: [R], of `predicting`.

    Raises:
        SlimeError: when such a token is trained.
    """
    if not first.any():
        return None
    if batch.host.loss_mask[first].any():
        row = int(np.flatnonzero(batch.host.lengths == batch.host.response_lengths)[0])
        raise SlimeError(
            f"sample {batch.host.sample_index[row]} has no prompt token, so its first response token cannot be "
            "trained; give it a prompt, or loss mask 0 there."
        )
    return torch.from_numpy(first).to(batch.device)
