"""What is counted while a round is collected."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    """The counts of one round, or of one evaluation; written on the event loop only."""

    num_wanted: int = 0
    """Groups to collect."""
    num_kept: int = 0
    """Groups collected so far."""
    num_samples: int = 0
    """Samples of groups that finished."""
    num_graded: int = 0
    """Samples that were graded, or failed."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason -> groups dropped for good."""
    failed: Counter[str] = field(default_factory=Counter)
    """Reward plugin -> samples it failed on."""
    first_failure: str = ""
    reward_sum: float = 0.0
    num_rewards: int = 0
