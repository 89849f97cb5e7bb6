"""Extra keys of a TrainBatch that its samples bring along, where any of them has what the key holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from slime_core.types import Sample

Keys: TypeAlias = dict[str, npt.NDArray[Any]]


def round_numbers(samples: Sequence[Sample]) -> Keys:
    """`round_number`, [S] int64, where generators note their turns in `metadata["round_number"]`; -1 without."""
    if not any("round_number" in sample.metadata for sample in samples):
        return {}
    return {"round_number": np.array([sample.metadata.get("round_number", -1) for sample in samples], np.int64)}


def shared_rewards(samples: Sequence[Sample]) -> Keys:
    """`shares_reward`, [S] bool, where samples of one trajectory share its reward."""
    shared = np.array([sample.shares_reward for sample in samples], np.bool_)
    return {"shares_reward": shared} if shared.any() else {}


def turn_rewards(samples: Sequence[Sample]) -> Keys:
    """`turn_reward`, [R] float32, where samples have rewards by turn: on each turn's last token, NaN elsewhere."""
    if not any(sample.turn_rewards for sample in samples):
        return {}
    parts = [np.full(sample.response_length, np.nan, np.float32) for sample in samples]
    for part, sample in zip(parts, samples, strict=True):
        for end, reward in zip(sample.turn_ends, sample.turn_rewards, strict=bool(sample.turn_rewards)):
            if end:
                part[end - 1] = reward
    return {"turn_reward": np.concatenate(parts)}
