"""Text from token ids, and the search for stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from slime_core.engines.embedded.request import SamplingParams


def decode(tokenizer: PreTrainedTokenizerBase | None, ids: Sequence[int], params: SamplingParams) -> str:
    """Turn ids into text; an engine without a tokenizer gives the empty string."""
    if tokenizer is None or not ids:
        return ""
    text: Any = tokenizer.decode(list(ids), skip_special_tokens=params.skip_special_tokens)
    return str(text)


def matched_stop(tokenizer: PreTrainedTokenizerBase, tail: Sequence[int], params: SamplingParams) -> str | None:
    """Return the stop string that the last tokens of an output complete, or None."""
    text = decode(tokenizer, tail, params)
    return next((stop for stop in params.stop if stop in text), None)


def tail_length(params: SamplingParams) -> int:
    """How many last tokens can hold the longest stop string: one a byte, and a few for a cut character."""
    return max(len(stop.encode()) for stop in params.stop) + 4


def response_text(
    tokenizer: PreTrainedTokenizerBase | None, ids: Sequence[int], matched: int | str | None, params: SamplingParams
) -> str:
    """The answer's text: what matched, a token or a string, is cut off unless no_stop_trim."""
    if isinstance(matched, int) and not params.no_stop_trim:
        ids = ids[:-1]
    text = decode(tokenizer, ids, params)
    if isinstance(matched, str) and not params.no_stop_trim and (cut := text.find(matched)) >= 0:
        return text[:cut]
    return text
