"""The two chat APIs as the server sees them: the same few functions each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from slime_gateway import anthropic_api, openai_api
from slime_gateway.chat import ChatRequest, Refusal, Reply

Body = dict[str, Any]


@dataclass(frozen=True)
class Api:
    """Bodies in, bodies and events of a stream out."""

    parse_request: Callable[[Body], ChatRequest]
    answer: Callable[[Body, Reply, Any], Body]
    stream: Callable[[Body], Stream]
    error: Callable[[Refusal], Body]


@dataclass(frozen=True)
class Stream:
    """The server-sent events of one answer."""

    opening: bytes
    ping: bytes
    """Sent while the model writes, so that neither side takes the connection for dead."""
    closing: Callable[[Reply, Any], Iterator[bytes]]
    """The answer itself, which is complete before any of it is sent."""
    error: Callable[[Refusal], bytes]


def _openai_stream(body: Body) -> Stream:
    head = openai_api.stream_head(body)

    def closing(reply: Reply, tokenizer: Any) -> Iterator[bytes]:
        for event in openai_api.events(body, head, reply, tokenizer):
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    return Stream(
        b"data: " + json.dumps(openai_api.first_event(head)).encode() + b"\n\n",
        b": the model is writing\n\n",
        closing,
        lambda refusal: b"data: " + json.dumps(openai_api.error(refusal)).encode() + b"\n\n",
    )


def _anthropic_stream(body: Body) -> Stream:
    def encoded(event: Body) -> bytes:
        return f"event: {event['type']}\ndata: ".encode() + json.dumps(event).encode() + b"\n\n"

    def closing(reply: Reply, tokenizer: Any) -> Iterator[bytes]:
        return map(encoded, anthropic_api.events(body, reply))

    return Stream(
        encoded(anthropic_api.first_event(body)),
        encoded({"type": "ping"}),
        closing,
        lambda refusal: encoded(anthropic_api.error(refusal)),
    )


OPENAI = Api(openai_api.parse_request, openai_api.answer, _openai_stream, openai_api.error)
ANTHROPIC = Api(
    anthropic_api.parse_request,
    lambda body, reply, tokenizer: anthropic_api.answer(body, reply),
    _anthropic_stream,
    anthropic_api.error,
)
