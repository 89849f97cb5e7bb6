"""`--generate search_r1 --reward search_r1`: the model thinks, searches, reads and answers."""

from slime_search_r1.plugin import SearchR1

__all__ = ["SearchR1"]
