"""Whatever agents ask: every sampled token is trained once, as it was sampled, behind the text that was asked."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core import Generation, Sample
from slime_gateway.chat import ChatRequest, render
from slime_gateway.trajectory import Trajectories

TEXTS = st.text(alphabet="12 x\n<é", min_size=1, max_size=6)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["continue", "continue", "edit", "earlier", "new"]),
        TEXTS,
        st.lists(st.integers(0, 256), max_size=6),
        st.booleans(),  # the turn ends with the token for it
        st.booleans(),  # the answer reaches the agent
        st.integers(0, 7),  # in how many parts the engine answers; which turn to go back to
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150)
@given(steps=STEPS)
def test_every_sampled_token_is_trained_once_and_its_context_is_the_text_that_was_asked(tokenizer, steps):
    trajectories = Trajectories(Sample(), tokenizer)
    heard: list[dict] = []
    sampled, position = [], 0
    for kind, text, tokens, ends, delivered, number in steps:
        messages = _next_messages(kind, heard, text, number)
        request_text = render(tokenizer, ChatRequest(messages), {})
        turn = trajectories.begin(request_text, messages)
        assert trajectories.decode(turn.sample.tokens) == request_text
        said = [*tokens, tokenizer.eos_token_id] if ends else tokens
        for part in np.array_split(np.array(said, np.int32), 1 + number % 3):
            turn.extend(_generation(part, position))
            position += len(part)
        raw_text = trajectories.decode(tokens)
        answer = {"role": "assistant", "content": raw_text}
        trajectories.finish(turn, answer, raw_text)
        if delivered:
            sampled += range(position - len(said), position)
            heard = [*messages, answer]
        else:
            trajectories.undo(turn)
    trained = []
    for trajectory in trajectories.all:
        sample = trajectory.sample
        sample.check()
        own = sample.loss_mask > 0
        assert np.array_equal(np.isnan(sample.logprobs), ~own)
        assert np.array_equal(sample.weight_versions >= 0, own)
        assert (np.flatnonzero(own) < sample.turn_ends[-1]).all() if own.any() else True
        trained += (-sample.logprobs[own]).astype(int).tolist()
        assert trajectories.decode(sample.tokens) == trajectory.text
    assert sorted(trained) == sampled


def _next_messages(kind: str, heard: list[dict], text: str, number: int) -> list[dict]:
    added = {"role": "user", "content": text}
    if kind == "new" or not heard:
        return [added]
    if kind == "edit":
        return [*heard[:-1], {"role": "assistant", "content": heard[-1]["content"] + "!"}, added]
    if kind == "earlier":
        return [*heard[: 2 * (number % (len(heard) // 2)) or None], added]
    return [*heard, added]


def _generation(tokens: np.ndarray, position: int) -> Generation:
    return Generation(
        tokens=tokens,
        text="",
        logprobs=-np.arange(position, position + len(tokens), dtype=np.float32),
        weight_versions=np.zeros(len(tokens), np.int32),
        finish_reason="stop",
    )
