"""Turns against an engine server: stopped at any token and taken up again, a conversation is the same."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from slime_core import Generation, Sample, Status, Turn, take_turns
from slime_core.engines.client import EngineClient

PROMPT = "where?"
LETTERS = {str(ord(letter)): 100.0 for letter in "abcdefgh"}
"""A bias that leaves the random model nothing but these."""
GREEDY = {"temperature": 0.0, "max_new_tokens": 40, "logit_bias": LETTERS}


class Interrupted:
    """The engine, whose k-th request of all is aborted after `lives[k]` tokens."""

    def __init__(self, client: EngineClient, lives: Sequence[int]) -> None:
        self._client, self._lives = client, list(lives)
        self.tokenizer, self.context_tokens = client.tokenizer, client.context_tokens

    async def until_stopped(self) -> None:
        await asyncio.Event().wait()

    async def generate(self, tokens: Any, params: dict[str, Any], **request: Any) -> Generation:
        life = self._lives.pop(0) if self._lives else params["max_new_tokens"]
        generation = await self._client.generate(
            tokens, {**params, "max_new_tokens": min(life, params["max_new_tokens"])}, **request
        )
        cut = generation.finish_reason == "length" and life < params["max_new_tokens"]
        return replace(generation, finish_reason="abort") if cut else generation


async def converse(server: Any, stop: Sequence[str], lives: Sequence[int] = ()) -> Sample:
    async def reply(turn: Turn) -> str:
        return f"<{turn.number}>"

    tokenizer = AutoTokenizer.from_pretrained(server.model_dir)
    sample = Sample(tokens=np.array(tokenizer.encode(PROMPT, add_special_tokens=False), np.int32))
    async with EngineClient(server.url, tokenizer=tokenizer, concurrency=8, timeout_s=60) as client:
        engine = Interrupted(client, lives)
        while sample.status in (Status.PENDING, Status.ABORTED):
            sample = await take_turns(engine, sample, GREEDY, reply, max_turns=3, stop=stop, max_turn_tokens=12)
    return sample


@pytest.mark.parametrize("lives", [[life] for life in range(1, 9)] + [[1] * 30, [2, 3] * 10])
async def test_an_interrupted_conversation_is_the_unbroken_one(server: Any, lives: list[int]) -> None:
    said = (await converse(server, [])).response
    stop = said[4:7]
    assert set(stop) <= set("abcdefgh")
    unbroken, interrupted = await converse(server, [stop]), await converse(server, [stop], lives)
    assert unbroken.response[: unbroken.turn_ends[0]].endswith(stop)
    assert interrupted.response == unbroken.response
    assert interrupted.tokens.tolist() == unbroken.tokens.tolist()
    assert interrupted.loss_mask.tolist() == unbroken.loss_mask.tolist()
    assert interrupted.turn_ends == unbroken.turn_ends
    np.testing.assert_allclose(interrupted.logprobs, unbroken.logprobs, atol=1e-4)
