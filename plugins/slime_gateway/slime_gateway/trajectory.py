"""The token-exact record of a session: conversations as the engine saw them, never encoded twice."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from slime_core import Generation, Sample, Status
from slime_gateway.chat import Message, canonical

TOKENS_A_CHARACTER = 4
"""At most: a character has up to four bytes, and a token at least one."""


@dataclass
class Trajectory:
    """One conversation: a sample that grows, and the text that its tokens stand for."""

    number: int
    """In the session."""
    sample: Sample
    text: str
    """Prompt and response as the chat template writes them, special tokens included."""
    marks: list[tuple[int, int]]
    """(tokens, characters) at the beginning and end of every turn of the model."""
    messages: list[Message] = field(default_factory=list)
    open: bool = False
    """Whether a turn is under way."""
    num_turns: int = 0
    finished_at: int = -1
    """When its last turn was finished: a number that grows with every turn of the session."""
    latest: Turn | None = None
    """The turn that was opened last."""


@dataclass
class Turn:
    """A turn under way: what a request added to a trajectory, and what the engine generates for it."""

    trajectory: Trajectory
    before: Trajectory | None
    """The trajectory as it was, None where the turn began it."""
    start: int
    """Number of tokens before the first generated one."""
    messages: list[Message]
    finished: bool = False

    @property
    def sample(self) -> Sample:
        """The trajectory's sample."""
        return self.trajectory.sample

    @property
    def generated(self) -> list[int]:
        """The turn's sampled tokens."""
        return [int(token) for token in self.sample.tokens[self.start :]]

    def extend(self, generation: Generation) -> None:
        """Add what the engine generated."""
        self.sample.append_generation(generation)


class Trajectories:
    """All conversations of one session.

    A request whose text begins with a trajectory's text goes on from that trajectory's very tokens, and only what is
    new is encoded. Any other begins a trajectory of its own, whose prompt is never trained, so that each sampled token
    is trained in one trajectory only:

    - `branch`: it leaves a known conversation at an earlier turn (a second attempt, a subagent, compacted history);
    - `drift`: it is a known conversation, but an assistant turn does not read as it was recorded: the agent changed
      it, or the template writes it in another way (thoughts of earlier turns left out, white space stripped).
    """

    def __init__(self, prototype: Sample, tokenizer: Any) -> None:
        self._prototype = prototype
        self._tokenizer = tokenizer
        self._numbers, self._finishes = itertools.count(), itertools.count()
        self.all: list[Trajectory] = []
        self.counts: Counter[str] = Counter()
        """`branch`, `drift`; `retokenized`: turns whose text encodes to other tokens than those sampled."""

    @property
    def answered(self) -> list[Trajectory]:
        """Those with a finished turn, the one that the agent heard from last behind the others."""
        return sorted((t for t in self.all if t.num_turns), key=lambda t: t.finished_at)

    def begin(self, text: str, messages: list[Message]) -> Turn:
        """Open a turn for a conversation that reads `text`."""
        base, (num_tokens, num_characters) = self._longest_shared(text)
        if base is not None and not base.open and base.num_turns and (num_tokens, num_characters) == base.marks[-1]:
            before = _copy(base)
            base.sample.append(self._encode(text[num_characters:]), text=text[num_characters:], trainable=False)
            trajectory = base
        else:
            before, trajectory = None, self._forked(base, num_tokens, num_characters, text, messages)
        trajectory.text, trajectory.open = text, True
        start = len(trajectory.sample.tokens)
        trajectory.marks = [*trajectory.marks, (start, len(text))]
        trajectory.latest = Turn(trajectory, before, start, messages)
        return trajectory.latest

    def finish(self, turn: Turn, answer: Message, raw_text: str) -> None:
        """Close a turn that was generated whole; the conversation goes on from its last token."""
        trajectory = turn.trajectory
        tokens = turn.generated
        trajectory.text += self.decode(tokens)
        trajectory.marks = [*trajectory.marks, (len(trajectory.sample.tokens), len(trajectory.text))]
        trajectory.messages = [*turn.messages, answer]
        trajectory.open = False
        turn.finished = True
        trajectory.num_turns += 1
        trajectory.finished_at = next(self._finishes)
        trajectory.sample.turn_ends.append(trajectory.sample.response_length)
        again = self._encode(raw_text)
        if again != tokens[: len(again)] or len(tokens) - len(again) > 1:
            self.counts["retokenized"] += 1

    def undo(self, turn: Turn) -> bool:
        """Forget a turn that never reached the agent; False when the conversation has gone on, or it is forgotten."""
        trajectory = turn.trajectory
        if trajectory.latest is not turn:
            return False
        if turn.before is None:
            self.all = [other for other in self.all if other is not trajectory]
            trajectory.latest = None
        else:
            _restore(trajectory, turn.before)
        return True

    def up_to_stop(self, turn: Turn, generation: Generation, stop: Sequence[str]) -> Generation:
        """What continues an aborted turn, without what follows a stop string that the abort cut in two.

        Engines look for stop strings in what one request made, and miss a string that two requests made together.
        """
        begun, reach = turn.generated, TOKENS_A_CHARACTER * max(map(len, stop), default=0)
        near = begun[max(0, len(begun) - reach) :]
        for count in range(1, min(reach, len(generation.tokens)) + 1):
            text = self.decode([*near, *generation.tokens[:count].tolist()])
            if near and any(string in text for string in stop):
                return replace(
                    generation,
                    tokens=generation.tokens[:count],
                    text=self.decode(generation.tokens[:count].tolist()),
                    logprobs=generation.logprobs[:count],
                    weight_versions=generation.weight_versions[:count],
                    finish_reason="stop",
                )
        return generation

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _longest_shared(self, text: str) -> tuple[Trajectory | None, tuple[int, int]]:
        """The trajectory with the latest turn boundary up to which it reads as `text` does, and that boundary."""
        best: tuple[Trajectory | None, tuple[int, int]] = (None, (0, 0))
        for trajectory in self.all:
            for mark in reversed(trajectory.marks):
                if mark[1] <= best[1][1]:
                    break
                if text.startswith(trajectory.text[: mark[1]]):
                    best = (trajectory, mark)
                    break
        return best

    def _forked(
        self, base: Trajectory | None, num_tokens: int, num_characters: int, text: str, messages: list[Message]
    ) -> Trajectory:
        if any(_same_conversation(trajectory.messages, messages) for trajectory in self.all):
            self.counts["drift"] += 1
        elif base is not None:
            self.counts["branch"] += 1
        sample = self._prototype.clone()
        shared = np.empty(0, np.int32) if base is None else base.sample.tokens[:num_tokens]
        sample.tokens = np.concatenate([shared, np.array(self._encode(text[num_characters:]), np.int32)])
        sample.status = Status.COMPLETED
        trajectory = Trajectory(next(self._numbers), sample, text, [])
        self.all.append(trajectory)
        return trajectory

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _same_conversation(known: list[Message], asked: list[Message]) -> bool:
    """Whether `asked` goes on from `known` when nobody looks at what the assistant said."""
    return 0 < len(known) < len(asked) and all(
        one["role"] == other["role"] and (one["role"] == "assistant" or canonical(one) == canonical(other))
        for one, other in zip(known, asked, strict=False)
    )


def _copy(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, sample=trajectory.sample.clone())


def _restore(trajectory: Trajectory, before: Trajectory) -> None:
    for kept in fields(Trajectory):
        setattr(trajectory, kept.name, getattr(before, kept.name))
