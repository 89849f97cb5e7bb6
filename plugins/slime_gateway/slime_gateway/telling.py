"""What an agent is told of its answer while the model still writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from slime_gateway.chat import TOOL_CALL_BEGIN, ChatRequest, cut_at_stop


class Telling:
    """Passes on the text of a turn's tokens as they come, as far as it is in the answer whatever follows.

    `turn_ends` are the tokens that end a turn, and are no text of it where they do. A tokenizer that is not one of the
    library `tokenizers` tells nothing before the answer is complete.
    """

    def __init__(
        self, tokenizer: Any, turn_ends: Iterable[int], request: ChatRequest, on_text: Callable[[str], None]
    ) -> None:
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._decoding = DecodeStream(skip_special_tokens=False)
        self._turn_ends = frozenset(turn_ends)
        self._request = request
        self._on_text = on_text
        self._num_read = 0
        self._text = ""
        self._told = ""

    def read(self, tokens: Sequence[int]) -> None:
        """All tokens of the turn so far, and maybe more than last time."""
        if self._backend is None:
            return
        ready = tokens[:-1] if tokens and tokens[-1] in self._turn_ends else tokens
        for token in ready[self._num_read :]:
            self._text += self._decoding.step(self._backend, token) or ""
        self._num_read = max(self._num_read, len(ready))
        certain = certain_text(self._text, self._request)
        if len(certain) > len(self._told):
            self._on_text(certain[len(self._told) :])
            self._told = certain


def certain_text(text: str, request: ChatRequest) -> str:
    """The beginning of an answer's content, where the model has written `text` so far.

    Not yet certain is what may become a stop string or a tool call, and white space that may come before one.
    """
    certain, _ = cut_at_stop(text, request.stop)
    if request.keep_stop:
        certain = text
    elif certain == text:
        certain = _without_begun(text, request.stop)
    if request.tools:
        before, call, _ = certain.partition(TOOL_CALL_BEGIN)
        certain = (before if call else _without_begun(certain, [TOOL_CALL_BEGIN])).rstrip()
    return certain


def _without_begun(text: str, strings: Sequence[str]) -> str:
    """The text without the longest end with which one of the strings begins."""
    longest = max((len(string) - 1 for string in strings), default=0)
    for count in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-count:]) for string in strings):
            return text[:-count]
    return text
