"""Pure functions on tensors for authors of losses and advantage estimators.

Shapes: S samples in a batch, R response tokens in all, the tokens of sample after sample lying one after the other.
"""

from slime_core.algorithms.advantages import group_normalize, leave_one_out, whiten
from slime_core.algorithms.aggregation import (
    AGGREGATIONS,
    masked_mean,
    masked_sequence_mean,
    segment_sum,
    token_weights,
)
from slime_core.algorithms.correction import (
    CORRECTION_KINDS,
    CORRECTION_LEVELS,
    importance_weights,
    offpolicy_mask,
    vetoed_sequences,
    weight_sums,
)
from slime_core.algorithms.kl import KL_KINDS, kl_estimate
from slime_core.algorithms.ratios import cispo_loss, dual_clip, importance_ratio, ppo_clip_loss, sequence_ratio
from slime_core.algorithms.returns import at_last_token, discounted_returns, gae, value_loss

__all__ = [
    "AGGREGATIONS",
    "CORRECTION_KINDS",
    "CORRECTION_LEVELS",
    "KL_KINDS",
    "at_last_token",
    "cispo_loss",
    "discounted_returns",
    "dual_clip",
    "gae",
    "group_normalize",
    "importance_ratio",
    "importance_weights",
    "kl_estimate",
    "leave_one_out",
    "masked_mean",
    "masked_sequence_mean",
    "offpolicy_mask",
    "ppo_clip_loss",
    "segment_sum",
    "sequence_ratio",
    "token_weights",
    "value_loss",
    "vetoed_sequences",
    "weight_sums",
    "whiten",
]
