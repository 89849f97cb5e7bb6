"""A real tokenizer with a chat template, and an engine that plays a part: it answers with the tokens it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slime_core import Generation, Sample
from slime_gateway.chat import ChatRequest
from slime_gateway.session import Limits, Session

CHAT_TEMPLATE = """{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{{ message.content.split('</think>')[-1] if strip_thoughts else message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}
{%- else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""
"""ChatML; with `strip_thoughts`, it forgets what assistants thought, as templates of reasoning models do."""


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte a token, but for `12`, which has one of its own, so that `1`, `2` is another way to say it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate([*alphabet, "12"])}
    words = Tokenizer(models.BPE(vocab=vocabulary, merges=[("1", "2")]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


Say = Callable[[list[int]], Sequence[int]]


class PlayedEngine:
    """Says what `say` makes of the tokens so far, each token at log-prob -(position) under weight `version`.

    While held it tells a stream its first `num_partial` tokens, and others nothing; `stop` lets requests that wait come
    back ABORTED with as many.
    """

    def __init__(self, tokenizer: Any, say: Say) -> None:
        self.tokenizer = tokenizer
        self.context_tokens = 4096
        self.version = 0
        self.num_partial = 0
        self.requests: list[tuple[list[int], dict[str, Any]]] = []
        self.session_ids: list[str | None] = []
        self.under_way = 0
        self.num_cancelled = 0
        self.hold_after: int | None = None
        """Answer so many requests, then hold."""
        self._say = say
        self._free = asyncio.Event()
        self._free.set()
        self._stopping = asyncio.Event()

    @property
    def stopped(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        self._stopping.set()
        self._free.set()

    async def until_stopped(self) -> None:
        await self._stopping.wait()

    def hold(self) -> None:
        self._free.clear()

    def release(self) -> None:
        self._free.set()

    async def generate(
        self,
        tokens: Any,
        sampling_params: dict[str, Any],
        *,
        session_id: str | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
    ) -> Generation:
        ids = [int(token) for token in tokens]
        if self.stopped:
            return self._generation(ids, [], "abort")
        self.requests.append((ids, sampling_params))
        self.session_ids.append(session_id)
        if self.hold_after == len(self.requests) - 1:
            self.hold()
        said = list(self._say(ids))
        self.under_way += 1
        try:
            if on_tokens is not None and not self._free.is_set():
                on_tokens(said[: self.num_partial])
            await self._free.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.under_way -= 1
        if on_tokens is not None and not self.stopped:
            for count in range(1, len(said) + 1):
                on_tokens(said[:count])
        if self.stopped:
            return self._generation(ids, said[: self.num_partial], "abort")
        limit = sampling_params["max_new_tokens"]
        return self._generation(ids, said[:limit], "length" if len(said) > limit else "stop")

    def _generation(self, prompt: list[int], said: list[int], finish: str) -> Generation:
        shown = said[:-1] if said and said[-1] == self.tokenizer.eos_token_id else said
        return Generation(
            tokens=np.array(said, np.int32),
            text=self.tokenizer.decode(shown),
            logprobs=-np.arange(len(prompt), len(prompt) + len(said), dtype=np.float32),
            weight_versions=np.full(len(said), self.version, np.int32),
            finish_reason=finish,
            prompt_tokens=len(prompt),
        )


@pytest.fixture
def playing(tokenizer) -> Callable[..., PlayedEngine]:
    """`playing("first", "second")`: an engine that says these texts in turn, each with the token that ends a turn.

    A list of ids is said as it stands; a function gets the tokens so far.
    """

    def make(*script: str | list[int] | Say) -> PlayedEngine:
        if callable(script[0]):
            return PlayedEngine(tokenizer, script[0])
        said = [
            [*tokenizer.encode(entry, add_special_tokens=False), tokenizer.eos_token_id]
            if isinstance(entry, str)
            else entry
            for entry in script
        ]
        return PlayedEngine(tokenizer, lambda tokens: said.pop(0) if len(said) > 1 else said[0])

    return make


@pytest.fixture
def make_session(tokenizer) -> Callable[..., Session]:
    """`make_session(max_turns=...)`: a session of its own for a fresh sample."""

    def make(
        *, max_turns: int = 64, timeout_s: float = 60.0, max_new_tokens: int = 2048, context_tokens: int = 4096
    ) -> Session:
        return Session(
            Sample(prompt="task", index=3, group_index=1, rollout_index=3, session_id="1-3"),
            tokenizer=tokenizer,
            context_tokens=context_tokens,
            sampling_params={"temperature": 1.0, "max_new_tokens": max_new_tokens, "stop": []},
            template_kwargs={},
            limits=Limits(max_turns, timeout_s),
        )

    return make


@pytest.fixture
def asking() -> Callable[..., ChatRequest]:
    """`asking("hello", "an answer", "more")`: a request whose messages are by user and assistant in turn."""

    def make(*texts: str, **fields: Any) -> ChatRequest:
        roles = ["user", "assistant"]
        return ChatRequest([{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)], **fields)

    return make
