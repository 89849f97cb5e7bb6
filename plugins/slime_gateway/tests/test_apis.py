"""Whatever a client sends is understood or refused; nothing makes the server fail."""

import contextlib
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slime_gateway.api import ANTHROPIC, OPENAI
from slime_gateway.chat import Refusal, Reply, parse_tool_calls, render

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
ANYTHING = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
FIELDS = (
    "role",
    "content",
    "tool_calls",
    "tool_call_id",
    "name",
    "type",
    "text",
    "id",
    "input",
    "tool_use_id",
    "function",
    "arguments",
)
BLOCKS = st.dictionaries(
    st.sampled_from(FIELDS), ANYTHING | st.sampled_from(["user", "assistant", "text", "tool_use", "tool_result"])
)
MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(FIELDS),
        ANYTHING | st.lists(BLOCKS, max_size=3) | st.sampled_from(["user", "assistant", "tool"]),
    )
)
BODIES = st.fixed_dictionaries(
    {"messages": MESSAGES | ANYTHING},
    optional={
        key: ANYTHING
        for key in (
            "system", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "stop_sequences", "n",
            "response_format", "chat_template_kwargs", "stream", "stream_options", "model", "logprobs",
        )
    },
)  # fmt: skip


@pytest.mark.parametrize("api", [OPENAI, ANTHROPIC], ids=["openai", "anthropic"])
@given(body=BODIES)
def test_any_body_is_a_request_or_refused(tokenizer, api, body):
    with contextlib.suppress(Refusal):
        request = api.parse_request(body)
        text = render(tokenizer, request, {})
        assert isinstance(text, str)
        api.stream(body)


@given(st.text(alphabet='<tool_call>/{}":,nameargu1 ', max_size=60))
@example("<tool_call></tool_call>")
@example('<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>')
@example('<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>')
def test_any_text_has_calls_or_is_text(text):
    shown, calls = parse_tool_calls(text)
    assert calls or shown == text
    for call in calls:
        assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("api", [OPENAI, ANTHROPIC], ids=["openai", "anthropic"])
@given(told=st.text(), rest=st.text(), finish=st.sampled_from(["stop", "length"]))
def test_a_stream_says_what_the_whole_answer_says(tokenizer, api, told, rest, finish):
    reply = Reply(told + rest, [], finish, None, [1, 2], [-1.0, -2.0], 3, told + rest)
    body = {"model": "m"}
    whole = api.answer(body, reply, tokenizer)
    stream = api.stream(body)
    begun = [stream.text(piece, first=number == 0) for number, piece in enumerate(told)]
    said = ""
    for event in b"".join([*begun, *stream.closing(reply, told, tokenizer)]).decode().split("\n\n"):
        data = event.rpartition("data: ")[2].strip()
        if data and data != "[DONE]":
            event = json.loads(data)
            said += event.get("delta", {}).get("text", "") if api is ANTHROPIC else ""
            said += "".join(c["delta"].get("content", "") for c in event.get("choices", []))
    assert said == (whole["content"][0]["text"] if api is ANTHROPIC else whole["choices"][0]["message"]["content"])


def test_an_answer_that_only_opens_calls_is_text_however_long_it_is():
    text = "<tool_call>" * 200_000  # a search to the end from every opening would take hours
    assert parse_tool_calls(text) == (text, [])
