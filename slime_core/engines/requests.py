"""The requests of one round or evaluation, which are stopped together."""

from __future__ import annotations


class Requests:
    """Request ids under way at the engines. Once stopped, no further one is sent."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.stopped = False
        self.discarded = False
        """Whether nobody wants what they answer once they are stopped."""
        self.num_tokens = 0
        """Tokens that the engines generated for them."""
