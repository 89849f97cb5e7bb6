"""The two chat APIs as the server sees them: the same few functions each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

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


class Text(Protocol):
    """A piece of the content as events."""

    def __call__(self, piece: str, *, first: bool) -> bytes: ...


@dataclass(frozen=True)
class Stream:
    """The server-sent events of one answer."""

    opening: bytes
    ping: bytes
    """Sent while the model is silent, so that neither side takes the connection for dead."""
    text: Text
    """A piece of the content."""
    closing: Callable[[Reply, str, Any], Iterator[bytes]]
    """What is left of the answer behind the content that was told."""
    error: Callable[[Refusal], bytes]


def _openai_stream(body: Body) -> Stream:
    head = openai_api.stream_head(body)

    def encoded(event: Body) -> bytes:
        return b"data: " + json.dumps(event).encode() + b"\n\n"

    def text(piece: str, *, first: bool) -> bytes:
        return encoded(openai_api.text_event(head, piece))

    def closing(reply: Reply, told: str, tokenizer: Any) -> Iterator[bytes]:
        yield from map(encoded, openai_api.last_events(body, head, reply, told, tokenizer))
        yield b"data: [DONE]\n\n"

    return Stream(
        encoded(openai_api.first_event(head)),
        b": the model is writing\n\n",
        text,
        closing,
        lambda refusal: encoded(openai_api.error(refusal)),
    )


def _anthropic_stream(body: Body) -> Stream:
    def encoded(event: Body) -> bytes:
        return f"event: {event['type']}\ndata: ".encode() + json.dumps(event).encode() + b"\n\n"

    def text(piece: str, *, first: bool) -> bytes:
        return b"".join(map(encoded, anthropic_api.text_events(piece, first)))

    def closing(reply: Reply, told: str, tokenizer: Any) -> Iterator[bytes]:
        return map(encoded, anthropic_api.last_events(body, reply, told))

    return Stream(
        encoded(anthropic_api.first_event(body)),
        encoded({"type": "ping"}),
        text,
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
