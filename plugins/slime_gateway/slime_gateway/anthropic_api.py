"""Anthropic's `/v1/messages`: requests in, answers out, whole or as a stream of events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from slime_gateway.chat import ChatRequest, Message, Refusal, Reply, normalized, text_of
from slime_gateway.openai_api import MODEL, max_tokens_of, object_of, pieces, stop_of, untold

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
IGNORED_BLOCKS = ("thinking", "redacted_thinking")
"""The gateway sends none: what a model thinks is part of its text."""


def parse_request(body: dict[str, Any]) -> ChatRequest:
    """A request's body, in OpenAI's terms.

    Raises:
        Refusal: for what cannot be done.
    """
    messages: list[Message] = []
    if body.get("system"):
        messages.append({"role": "system", "content": text_of(body["system"], "system")})
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise Refusal(400, "invalid_messages", "`messages` must be a list of at least one message")
    for number, message in enumerate(given):
        messages += _converted(message, number)
    choice = object_of(body, "tool_choice").get("type", "auto")
    if choice not in ("auto", "none"):
        raise Refusal(400, "unsupported", "tool_choice can only be 'auto' or 'none'")
    tools = body.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        raise Refusal(400, "invalid_tools", "`tools` must be a list")
    return ChatRequest(
        messages=normalized(messages),
        tools=None if choice == "none" or tools is None else [_tool(tool) for tool in tools],
        max_tokens=max_tokens_of(body.get("max_tokens")),
        stop=stop_of(body.get("stop_sequences")),
        template_kwargs=object_of(body, "chat_template_kwargs"),
    )


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or "input_schema" not in tool:
        raise Refusal(400, "invalid_tools", "a tool must have a name and an input_schema; server tools are not there")
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _converted(message: Any, number: int) -> list[Message]:
    """One message as OpenAI's: results of tools become messages of their own, ahead of the text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refusal(400, "invalid_messages", f"message {number} must be an object with a role")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": message["role"], "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise Refusal(400, "invalid_messages", f"message {number}: content must be a text or a list of blocks")
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[Message] = []
    for block in content:
        kind = block.get("type")
        if kind == "text":
            texts.append(text_of([block], f"message {number}"))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            text = text_of(block.get("content"), f"message {number}")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind not in IGNORED_BLOCKS:
            raise Refusal(400, "unsupported_content", f"message {number}: blocks of type {kind} are not supported")
    if texts or calls or not results:
        own: Message = {"role": message["role"], "content": "".join(texts)}
        results.append({**own, "tool_calls": calls} if calls else own)
    return results


def answer(body: dict[str, Any], reply: Reply) -> dict[str, Any]:
    """The whole answer to a request that does not stream."""
    blocks: list[dict[str, Any]] = []
    if reply.content or not reply.tool_calls:
        blocks.append({"type": "text", "text": reply.content})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        for call in reply.tool_calls
    ]
    return {
        **_message(body),
        "content": blocks,
        **_stop(reply),
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": len(reply.tokens)},
    }


def first_event(body: dict[str, Any]) -> dict[str, Any]:
    """The event that opens a stream."""
    message = {**_message(body), "content": [], "stop_reason": None, "stop_sequence": None}
    return {"type": "message_start", "message": {**message, "usage": {"input_tokens": 0, "output_tokens": 0}}}


def text_events(piece: str, first: bool) -> Iterator[dict[str, Any]]:
    """A piece of the text, which is always the first block of an answer."""
    if first:
        yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece}}


def last_events(body: dict[str, Any], reply: Reply, told: str) -> Iterator[dict[str, Any]]:
    """The events that end a stream, behind the text that was told."""
    whole = answer(body, reply)
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            for number, piece in enumerate(pieces(untold(reply, told)) or [""]):
                yield from text_events(piece, first=not told and number == 0)
        else:
            yield {"type": "content_block_start", "index": index, "content_block": {**block, "input": {}}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": _stop(reply), "usage": whole["usage"]}
    yield {"type": "message_stop"}


def error(refusal: Refusal) -> dict[str, Any]:
    """The body of an error."""
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
    kind = kinds.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": f"{refusal} ({refusal.code})"}}


def _message(body: dict[str, Any]) -> dict[str, Any]:
    name = str(body.get("model", MODEL))
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": name}


def _stop(reply: Reply) -> dict[str, Any]:
    reason = STOP_REASONS[reply.finish_reason]
    if reply.stop_string is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": reply.stop_string}
