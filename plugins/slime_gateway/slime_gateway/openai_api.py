"""OpenAI's `/v1/chat/completions`: requests in, answers out, whole or as a stream of events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from slime_gateway.chat import ChatRequest, Refusal, Reply, normalized

MODEL = "policy"
"""What the model is called where a client must name one."""


def parse_request(body: dict[str, Any]) -> ChatRequest:
    """A request's body.

    Sampling parameters that the run decides (temperature, top_p, seed, penalties) are accepted and not looked at.

    Raises:
        Refusal: for what cannot be done.
    """
    if body.get("n") not in (None, 1):
        raise Refusal(400, "unsupported", "n > 1 is not supported; send the request n times")
    kind = object_of(body, "response_format").get("type", "text")
    if kind != "text":
        raise Refusal(400, "unsupported", f"response_format {kind} is not supported; ask for it in the prompt")
    tools, choice = body.get("tools") or None, body.get("tool_choice", "auto")
    if choice not in (None, "auto", "none"):
        raise Refusal(400, "unsupported", "tool_choice can only be 'auto' or 'none'")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise Refusal(400, "invalid_tools", "`tools` must be a list of objects")
    return ChatRequest(
        messages=normalized(body.get("messages")),
        tools=None if choice == "none" else tools,
        max_tokens=max_tokens_of(body.get("max_completion_tokens", body.get("max_tokens"))),
        stop=stop_of(body.get("stop")),
        keep_stop=bool(body.get("no_stop_trim", False)),
        template_kwargs=object_of(body, "chat_template_kwargs"),
    )


def max_tokens_of(value: Any) -> int | None:
    """A limit of tokens.

    Raises:
        Refusal: when it is no count.
    """
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise Refusal(400, "invalid_max_tokens", f"max_tokens must be a whole number of at least 1, got {value!r}")
    return value


def stop_of(value: Any) -> list[str]:
    """Stop strings: one, a list, or none.

    Raises:
        Refusal: for anything else.
    """
    strings = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(string, str) and string for string in strings):
        raise Refusal(400, "invalid_stop", "`stop` must be a text or a list of texts, none of them empty")
    return strings


def object_of(body: dict[str, Any], key: str) -> dict[str, Any]:
    """A field that is an object, empty where it is missing.

    Raises:
        Refusal: when it is anything else.
    """
    value = body.get(key) or {}
    if not isinstance(value, dict):
        raise Refusal(400, f"invalid_{key}", f"`{key}` must be an object")
    return value


def answer(body: dict[str, Any], reply: Reply, tokenizer: Any) -> dict[str, Any]:
    """The whole answer to a request that does not stream."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or None, "refusal": None}
    if reply.tool_calls:
        message["tool_calls"] = _tool_calls(reply)
    else:
        message["content"] = reply.content
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _logprobs(body, reply, tokenizer),
        "finish_reason": reply.finish_reason,
    }
    return {**_head(body, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


def first_event(head: dict[str, Any]) -> dict[str, Any]:
    """The event that opens a stream."""
    return {**head, "choices": [_delta({"role": "assistant", "content": ""})]}


def stream_head(body: dict[str, Any]) -> dict[str, Any]:
    """What every event of one stream has.

    Raises:
        Refusal: for options of a stream that are none.
    """
    object_of(body, "stream_options")
    return _head(body, "chat.completion.chunk")


def text_event(head: dict[str, Any], piece: str) -> dict[str, Any]:
    """A piece of the content."""
    return {**head, "choices": [_delta({"content": piece})]}


def last_events(
    body: dict[str, Any], head: dict[str, Any], reply: Reply, told: str, tokenizer: Any
) -> Iterator[dict[str, Any]]:
    """The events that end a stream, behind the content that was told."""
    for piece in pieces(untold(reply, told)):
        yield text_event(head, piece)
    if reply.tool_calls:
        calls = [{"index": i, **call} for i, call in enumerate(_tool_calls(reply))]
        yield {**head, "choices": [_delta({"tool_calls": calls})]}
    last = {**_delta({}), "finish_reason": reply.finish_reason, "logprobs": _logprobs(body, reply, tokenizer)}
    yield {**head, "choices": [last]}
    if object_of(body, "stream_options").get("include_usage"):
        yield {**head, "choices": [], "usage": _usage(reply)}


def untold(reply: Reply, told: str) -> str:
    """The content behind what was told of it."""
    return reply.content.removeprefix(told) if reply.content.startswith(told) else ""


def pieces(text: str, size: int = 64) -> list[str]:
    """A text in pieces, for streams."""
    return [text[start : start + size] for start in range(0, len(text), size)]


def error(refusal: Refusal) -> dict[str, Any]:
    """The body of an error."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": str(refusal), "type": kind, "param": None, "code": refusal.code}}


def models() -> dict[str, Any]:
    """`/v1/models`: the policy alone, whatever name requests give it."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "slime"}]}


def _head(body: dict[str, Any], kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": str(body.get("model", MODEL)),
    }


def _delta(delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": None}


def _tool_calls(reply: Reply) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.tool_calls
    ]


def _usage(reply: Reply) -> dict[str, Any]:
    written = len(reply.tokens)
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": written,
        "total_tokens": reply.prompt_tokens + written,
    }


def _logprobs(body: dict[str, Any], reply: Reply, tokenizer: Any) -> dict[str, Any] | None:
    if not body.get("logprobs"):
        return None
    content = []
    for token, logprob in zip(reply.tokens, reply.logprobs, strict=True):
        text = tokenizer.decode([token], skip_special_tokens=False)
        content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content, "refusal": None}
