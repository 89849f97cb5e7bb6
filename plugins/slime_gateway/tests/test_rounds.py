"""However often rounds end under an agent, in the midst of turns too: what the engines sampled is what is trained."""

import asyncio
import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core import Generation, Sample, Status
from slime_gateway.chat import ChatRequest
from slime_gateway.outcome import Outcome
from slime_gateway.session import Limits, Session

ANSWERS = st.lists(st.lists(st.integers(0, 256), min_size=1, max_size=5), min_size=1, max_size=6)
TURNS = st.lists(
    st.tuples(st.sampled_from(["continue", "continue", "edit", "new"]), st.text("12 x", min_size=1, max_size=4)),
    min_size=1,
    max_size=5,
)
STOPS = st.dictionaries(st.integers(0, 12), st.integers(0, 5), max_size=5)


class Lab:
    """Engines, one a round, which share one script and number every token that they sample."""

    def __init__(self, tokenizer, answers, stops) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.answers = itertools.cycle(answers)
        self.requests = itertools.count()
        self.sampled: list[tuple[int, int]] = []
        """(token, weight version), by number."""
        self.asked: list[tuple[int, list[int]]] = []
        """(number of the first token that was sampled, the tokens that it was sampled behind)."""

    def say(self, ids, tokens, version, finish) -> Generation:
        first = len(self.sampled)
        self.sampled += [(token, version) for token in tokens]
        if tokens:
            self.asked.append((first, ids))
        return Generation(
            tokens=np.array(tokens, np.int32),
            text="",
            logprobs=-np.arange(first, first + len(tokens), dtype=np.float32),
            weight_versions=np.full(len(tokens), version, np.int32),
            finish_reason=finish,
        )


class RoundEngine:
    """The engine of one round, which ends it at the requests that the lab names, with some tokens of the answer."""

    def __init__(self, lab: Lab, version: int) -> None:
        self._lab, self._version = lab, version
        self._stopping = asyncio.Event()

    async def until_stopped(self) -> None:
        await self._stopping.wait()

    async def generate(self, tokens, sampling_params, *, session_id=None) -> Generation:
        ids = [int(token) for token in tokens]
        if self._stopping.is_set():
            return self._lab.say(ids, [], self._version, "abort")
        answer = next(self._lab.answers)
        stop = self._lab.stops.get(next(self._lab.requests))
        if stop is None:
            return self._lab.say(ids, [*answer, self._lab.tokenizer.eos_token_id], self._version, "stop")
        self._stopping.set()
        return self._lab.say(ids, answer[:stop], self._version, "abort")


async def agent(session: Session, turns) -> None:
    heard: list[dict] = []
    for kind, text in turns:
        if kind == "edit" and heard:
            heard[-1] = {"role": "assistant", "content": heard[-1]["content"] + "!"}
        messages = [*([] if kind == "new" else heard), {"role": "user", "content": text}]
        request = ChatRequest(messages)
        reply = await session.generate(await session.begin(request), request)
        heard = [*messages, {"role": "assistant", "content": reply.content}]
    session.end(Outcome(reward=1.0))


async def rounds(lab: Lab, turns) -> list[Sample]:
    session = Session(
        Sample(index=0, rollout_index=0),
        tokenizer=lab.tokenizer,
        context_tokens=1 << 20,
        sampling_params={"max_new_tokens": 1 << 20, "stop": []},
        template_kwargs={},
        limits=Limits(max_turns=100, timeout_s=60),
    )
    working = asyncio.create_task(agent(session, turns))
    samples, indices = [session.prototype], itertools.count(1)
    for version in itertools.count():
        engine = RoundEngine(lab, version)
        parts = await asyncio.gather(*(session.run(engine, Sample.from_dict(s.to_dict())) for s in samples))
        for part in parts:  # numbered as the core does it
            for sample in part[1:]:
                sample.index = next(indices)
        samples = [sample for part in parts for sample in part]
        if all(sample.status is not Status.ABORTED for sample in samples):
            await working
            return samples
    raise AssertionError


@settings(max_examples=100)
@given(answers=ANSWERS, turns=TURNS, stops=STOPS)
def test_what_was_sampled_over_many_rounds_is_trained_once_and_behind_what_it_was_sampled_behind(
    tokenizer, answers, turns, stops
):
    lab = Lab(tokenizer, answers, stops)
    samples = asyncio.run(rounds(lab, turns))
    where = {}
    for sample in samples:
        sample.check()
        for position in np.flatnonzero(sample.loss_mask):
            number = int(-sample.logprobs[position])
            assert number not in where
            where[number] = sample, sample.prompt_length + int(position)
            token, version = lab.sampled[number]
            assert (sample.tokens[where[number][1]], sample.weight_versions[position]) == (token, version)
    assert sorted(where) == list(range(len(lab.sampled)))
    for first, behind in lab.asked:
        sample, position = where[first]
        assert sample.tokens[:position].tolist() == behind
    assert sum(not sample.shares_reward for sample in samples) == 1
