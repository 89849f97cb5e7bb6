"""`--generate search_r1`: the model searches a local corpus between turns."""

from slime_search_r1.corpus import Corpus
from slime_search_r1.generator import SearchR1

__all__ = ["Corpus", "SearchR1"]
