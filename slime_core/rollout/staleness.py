"""How old a group's tokens may be: which groups are too old to train, and which tokens are masked instead."""

from __future__ import annotations

import numpy as np

from slime_core.types import NO_VERSION, Group, Sample, Status


def oldest_version(group: Group) -> int | None:
    """The lowest weight version that made a token to be trained; None when no engine made any."""
    versions = [sample.weight_versions[_trained(sample)] for sample in group]
    return min((int(some.min()) for some in versions if some.size), default=None)


def mask_older(group: Group, version: int) -> None:
    """Take the tokens that earlier weights than `version` made out of the loss."""
    for sample in group:
        old = _trained(sample) & (sample.weight_versions < version)
        if old.any():
            sample.loss_mask = np.where(old, np.uint8(0), sample.loss_mask)


def has_something_to_train(group: Group) -> bool:
    """Whether a sample is still to be generated, or has a token that counts in the loss."""
    return any(s.status in (Status.PENDING, Status.ABORTED) or s.loss_mask.any() for s in group)


def _trained(sample: Sample) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    trained: np.ndarray[tuple[int], np.dtype[np.bool_]] = (sample.loss_mask > 0) & (
        sample.weight_versions != NO_VERSION
    )
    return trained
