"""What is told early is the beginning of the answer, whatever the model goes on to write."""

from hypothesis import given
from hypothesis import strategies as st

from slime_gateway.chat import ChatRequest, cut_at_stop, parse_tool_calls
from slime_gateway.telling import Telling, certain_text

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TEXTS = st.lists(st.sampled_from([*"abc< \n", "<tool_", "call>", "<tool_call>", CALL, "STOP", "é漢"]), max_size=8)
UNFINISHED = "\ufffd"
"""What a tokenizer shows where a character's bytes are not all there yet."""
STOPS = st.lists(st.sampled_from(["STOP", "ab", "a\n", "<", "bca"]), max_size=2)


def written(text: str, stop: list[str]) -> str:
    """The text up to where an engine that looks after every character finds a stop string."""
    ends = [text.find(string) + len(string) for string in stop if string in text]
    return text[: min(ends, default=len(text))]


def content_of(text: str, request: ChatRequest) -> str:
    shown = text if request.keep_stop else cut_at_stop(text, request.stop)[0]
    return parse_tool_calls(shown)[0] if request.tools else shown


@given(texts=TEXTS, stop=STOPS, tools=st.booleans(), keep_stop=st.booleans())
def test_every_text_that_is_certain_begins_the_content(texts, stop, tools, keep_stop):
    request = ChatRequest([], tools=[{}] if tools else None, stop=stop, keep_stop=keep_stop)
    whole = written("".join(texts), stop)
    content, before = content_of(whole, request), ""
    for count in range(len(whole) + 1):
        certain = certain_text(whole[:count], request)
        assert content.startswith(certain)
        assert certain.startswith(before)
        before = certain


def test_text_that_nothing_can_change_is_certain():
    assert certain_text("some words", ChatRequest([])) == "some words"
    assert certain_text("some words", ChatRequest([], tools=[{}], stop=["STOP"])) == "some words"


@given(text=st.text(max_size=20).filter(lambda text: not text.endswith(UNFINISHED)))
def test_pieces_are_whole_characters_and_together_the_text(tokenizer, text):
    tokens, told = tokenizer.encode(text, add_special_tokens=False), []
    telling = Telling(tokenizer, {tokenizer.eos_token_id}, ChatRequest([]), told.append)
    for count in range(len(tokens) + 1):
        telling.read(tokens[:count])
    telling.read([*tokens, tokenizer.eos_token_id])
    assert "".join(told) == text
    assert "" not in told


def test_what_may_be_half_a_character_waits_for_the_rest(tokenizer):
    told = []
    telling = Telling(tokenizer, {tokenizer.eos_token_id}, ChatRequest([]), told.append)
    telling.read(tokenizer.encode(f"a{UNFINISHED}", add_special_tokens=False))
    assert told == ["a"]
