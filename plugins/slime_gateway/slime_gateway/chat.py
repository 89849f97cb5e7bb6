"""Chat messages in both directions: what an agent asks as the model's text, what the model wrote as an answer."""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]

TOOL_CALL_BEGIN = "<tool_call>"
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
KEPT_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""What a chat template may look at; clients send more (`refusal`, `annotations`, ...)."""


class Refusal(Exception):
    """A request that is answered with an HTTP error; `code` is what programs read."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True)
class ChatRequest:
    """What a request asks, whichever API it came by.

    The run's own sampling parameters hold: a request only bounds its tokens and adds stop strings.
    """

    messages: list[Message]
    """In OpenAI's form, normalized."""
    tools: list[dict[str, Any]] | None = None
    """In OpenAI's form."""
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    keep_stop: bool = False
    """Whether the answer keeps the stop string that ended it."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote, `arguments` as JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """The answer to a request."""

    content: str
    tool_calls: list[ToolCall]
    finish_reason: str
    """stop, length or tool_calls."""
    stop_string: str | None
    """The requested stop string that ended it."""
    tokens: list[int]
    """The sampled tokens, the one that ends the turn included."""
    logprobs: list[float]
    prompt_tokens: int
    raw_text: str
    """What the model wrote, without the token that ends the turn."""


def normalized(messages: Any) -> list[Message]:
    """The messages with the fields that templates know, contents in parts joined to texts.

    Raises:
        Refusal: when they are no chat messages, or hold anything but text.
    """
    if not isinstance(messages, list) or not messages:
        raise Refusal(400, "invalid_messages", "`messages` must be a list of at least one message")
    return [_normalized_message(message, number) for number, message in enumerate(messages)]


def _normalized_message(message: Any, number: int) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refusal(400, "invalid_messages", f"message {number} must be an object with a role")
    out = {key: message[key] for key in KEPT_FIELDS if message.get(key) is not None}
    out["content"] = text_of(message.get("content"), f"message {number}")
    if "tool_calls" in out:
        out["tool_calls"] = [_normalized_call(call, number) for call in _list_of_objects(out["tool_calls"], number)]
        if not out["tool_calls"]:
            del out["tool_calls"]
    return out


def _list_of_objects(value: Any, number: int) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise Refusal(400, "invalid_messages", f"message {number}: tool_calls must be a list of objects")
    return value


def _normalized_call(call: dict[str, Any], number: int) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refusal(400, "invalid_messages", f"message {number}: a tool call needs a function with a name")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)  # templates write objects, clients send text
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def text_of(content: Any, where: str) -> str:
    """A content as text: a string, nothing, or a list of text parts.

    Raises:
        Refusal: for images and the like.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(text for text in texts if text)
    raise Refusal(400, "unsupported_content", f"{where}: only text content is supported")


def render(tokenizer: Any, request: ChatRequest, raw_answers: dict[tuple[str, ...], tuple[str, str]]) -> str:
    """The conversation as the model's chat template writes it, up to where the assistant's next turn begins.

    Args:
        raw_answers: tool call ids of an answer -> (its `canonical` form, what the model wrote). An answer that comes
            back unchanged is rendered as the model wrote it; templates write the JSON of calls their own way.

    Raises:
        Refusal: when the template refuses the messages.
    """
    import jinja2

    messages = [_as_written(message, raw_answers) for message in request.messages]
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tools=request.tools, add_generation_prompt=True, tokenize=False, **request.template_kwargs
        )
        text.encode()  # half a surrogate pair has no tokens
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise Refusal(
            400, "invalid_messages", f"the chat template refuses the messages: {type(error).__name__}: {error}"
        ) from None
    return text


def _as_written(message: Message, raw_answers: dict[tuple[str, ...], tuple[str, str]]) -> Message:
    calls = message.get("tool_calls")
    if message["role"] != "assistant" or not calls:
        return message
    known = raw_answers.get(tuple(str(call["id"]) for call in calls))
    if known is None or known[0] != canonical(message):
        return message
    return {"role": "assistant", "content": known[1]}


def canonical(message: Message) -> str:
    """A text that two messages share when a template cannot tell them apart, but for the ids of tool calls."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return json.dumps([message["role"], message["content"], calls], sort_keys=True)


def reply_message(reply: Reply) -> Message:
    """The answer as the normalized message that the agent is expected to send back."""
    message: Message = {"role": "assistant", "content": reply.content}
    if reply.tool_calls:
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in reply.tool_calls
        ]
        message["tool_calls"] = calls
    return message


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Text and calls of an answer in the Hermes form, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    Where any call is malformed, the whole answer is text and the agent decides what to make of it.
    """
    if text.rfind(TOOL_CALL_BEGIN) > text.rfind("</tool_call>"):
        return text, []  # an answer that only opens would be searched to its end at every opening
    bodies = TOOL_CALL.findall(text)
    calls = [_parsed_call(body) for body in bodies]
    whole = [call for call in calls if call is not None]
    if not whole or len(whole) < text.count(TOOL_CALL_BEGIN):
        return text, []
    return TOOL_CALL.sub("", text).rstrip(), whole


def _parsed_call(body: str) -> ToolCall | None:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", call["name"], json.dumps(arguments, ensure_ascii=False))


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The text up to the first stop string in it, and that string."""
    found = [(text.find(string), string) for string in stop if string in text]
    if not found:
        return text, None
    position, string = min(found)
    return text[:position], string
