"""Pure functions on tensors for authors of losses and advantage estimators.

Shapes: S samples in a batch, R response tokens in all, the tokens of sample after sample lying one after the other.
"""

from slime_core.algorithms.advantages import group_normalize, whiten
from slime_core.algorithms.aggregation import masked_mean, masked_sequence_mean, segment_sum, token_weights
from slime_core.algorithms.kl import KL_KINDS, kl_estimate
from slime_core.algorithms.ratios import importance_ratio, ppo_clip_loss

__all__ = [
    "KL_KINDS",
    "group_normalize",
    "importance_ratio",
    "kl_estimate",
    "masked_mean",
    "masked_sequence_mean",
    "ppo_clip_loss",
    "segment_sum",
    "token_weights",
    "whiten",
]
