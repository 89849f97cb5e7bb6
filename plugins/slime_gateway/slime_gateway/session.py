"""One session: what an agent does for one sample, from its first request to the samples that are trained."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slime_core import EngineError, Sample, SlimeError, Status
from slime_gateway.chat import (
    ChatRequest,
    Refusal,
    Reply,
    canonical,
    cut_at_stop,
    parse_tool_calls,
    render,
    reply_message,
)
from slime_gateway.outcome import Outcome
from slime_gateway.telling import Telling
from slime_gateway.trajectory import Trajectories, Trajectory, Turn

MAX_ABORTS = 3
"""How often a generation that is aborted, though the round goes on, is continued."""

TRAJECTORY_KEY = "gateway_trajectory"
"""In a sample's metadata: which of its session's conversations it is."""
SESSION_KEY = "gateway_session"
"""In the metadata of an ABORTED sample: the session that it waits for."""


@dataclass(frozen=True)
class Limits:
    """What one session may use."""

    max_turns: int
    timeout_s: float
    """Of the agent, the time between rounds left out."""


class Session:
    """The door between an agent and the engine.

    The agent's requests come from the server, the engine from `run`. While no round goes on, requests wait.
    """

    def __init__(
        self,
        sample: Sample,
        *,
        tokenizer: Any,
        context_tokens: int,
        sampling_params: dict[str, Any],
        template_kwargs: dict[str, Any],
        limits: Limits,
    ) -> None:
        self.key = f"slime-{secrets.token_urlsafe(24)}"
        self.id = secrets.token_hex(8)
        self.prototype = sample.clone()
        self.prototype.restart()
        for key in (SESSION_KEY, TRAJECTORY_KEY, "round_number"):  # of a session that is gone
            self.prototype.metadata.pop(key, None)
        self.trajectories = Trajectories(self.prototype, tokenizer)
        self.outcome: Outcome | None = None
        self.counts: Counter[str] = Counter()
        self._tokenizer = tokenizer
        self._turn_ends = {*tokenizer.all_special_ids, tokenizer.eos_token_id}
        self._context_tokens = context_tokens
        stop = sampling_params.get("stop") or []
        self._params = {**sampling_params, "stop": [stop] if isinstance(stop, str) else list(stop)}
        self._template_kwargs = template_kwargs
        self._limits = limits
        self._time_left_s = limits.timeout_s
        self._limit_hit: str | None = None
        self._raw_answers: dict[tuple[str, ...], tuple[str, str]] = {}
        self._engine: Any = None
        self._stopped: asyncio.Future[None] | None = None
        """Done when the engine's round has enough."""
        self._has_engine = asyncio.Event()
        self._over = asyncio.Event()
        self._generations: set[asyncio.Task[Any]] = set()
        self._error: SlimeError | None = None
        self._num_calls, self._since = 0, 0.0
        self._claimed: set[int] = set()

    # --- for the generator ---------------------------------------------------------------------------------------
    async def run(self, engine: Any, sample: Sample) -> list[Sample]:
        """What came of the session: its samples, or ABORTED ones when the round has enough.

        Under partial rollout the ABORTED samples come back, each with a call of its own, and the session goes on
        where it was: the first call takes the conversations that nobody claims. One that is no branch gives at least
        one sample; a branch none, when its conversation was forgotten or the session failed.

        Raises:
            SlimeError: what an engine request of the agent raised.
        """
        mine, branch = self._claim(sample), is_branch(sample)
        if not self._num_calls:
            self._since = time.monotonic()
        self._num_calls += 1
        try:
            return await self._run(engine, mine, branch)
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._claimed.clear()
                self._time_left_s = max(0.0, self._time_left_s - (time.monotonic() - self._since))

    async def _run(self, engine: Any, mine: int | None, branch: bool) -> list[Sample]:
        self._engine = engine
        self._has_engine.set()
        over, stopped = asyncio.ensure_future(self._over.wait()), asyncio.ensure_future(engine.until_stopped())
        self._stopped = stopped
        try:
            await asyncio.wait({over, stopped}, timeout=self._time_left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
            stopped.cancel()
        if not self._over.is_set() and stopped.done() and not stopped.cancelled():
            return await self._parked(engine, mine, branch)
        if not self._over.is_set():
            self._limit_hit = f"the agent had not ended after {self._limits.timeout_s:g} s"
            self._cut_short(*self.trajectories.answered[-1:])
            self.end(Outcome())
        if self._error is not None:
            raise self._error
        return self._samples(mine, branch)

    def end(self, outcome: Outcome) -> None:
        """The agent has ended; further requests are refused. The first outcome counts."""
        if self._over.is_set():
            return
        self.outcome = outcome
        self._over.set()
        self._has_engine.set()
        for task in self._generations:
            task.cancel()

    def knows(self, sample: Sample) -> bool:
        """Whether a sample came from this session, ABORTED."""
        return sample.status is Status.ABORTED and sample.metadata.get(SESSION_KEY) == self.id

    @property
    def over(self) -> bool:
        """Whether the agent has ended."""
        return self._over.is_set()

    # --- for the server ------------------------------------------------------------------------------------------
    async def begin(self, request: ChatRequest) -> Turn:
        """Open a turn for a request.

        Raises:
            Refusal: when the session is over, has no turn or no token left, or the template refuses the messages.
        """
        self._require_open()
        if self.counts["turns"] >= self._limits.max_turns:
            self._limit_hit = f"--gateway-max-turns {self._limits.max_turns} are over"
            self._cut_short(*self.trajectories.answered[-1:])
            raise Refusal(400, "turn_limit", f"{self._limit_hit}; end the task with what you have")
        self.counts["turns"] += 1
        text = await asyncio.to_thread(render, self._tokenizer, self.completed(request), self._raw_answers)
        self._require_open()
        turn = self.trajectories.begin(text, request.messages)
        if self._room(turn, request) <= 0:
            num_tokens = len(turn.sample.tokens)
            self.trajectories.undo(turn)
            self._limit_hit = (
                f"a conversation of {num_tokens} tokens leaves no room for an answer (--max-response-tokens, "
                "--max-context-tokens)"
            )
            self._cut_short(turn.trajectory)
            raise Refusal(400, "context_length_exceeded", f"{self._limit_hit}; end the task with what you have")
        return turn

    def completed(self, request: ChatRequest) -> ChatRequest:
        """The request with the run's own arguments for the chat template, under those it brings."""
        return replace(request, template_kwargs={**self._template_kwargs, **request.template_kwargs})

    async def generate(self, turn: Turn, request: ChatRequest, on_text: Callable[[str], None] | None = None) -> Reply:
        """Let the model write the turn. A turn that fails or is cancelled is forgotten.

        Args:
            on_text: is told the answer's content, piece by piece while the model writes it, but for its end.

        Raises:
            Refusal: when the session ends meanwhile, or the engine fails.
        """
        telling = None if on_text is None else Telling(self._tokenizer, self._turn_ends, request, on_text)
        try:
            await self._write(turn, request, telling)
        except BaseException:
            self.trajectories.undo(turn)
            raise
        reply = self._reply(turn, request)
        message = reply_message(reply)
        if reply.tool_calls:
            self._raw_answers[tuple(call.id for call in reply.tool_calls)] = (canonical(message), reply.raw_text)
        self.trajectories.finish(turn, message, reply.raw_text)
        return reply

    def undo(self, turn: Turn) -> None:
        """Forget a turn whose answer did not reach the agent."""
        if self.trajectories.undo(turn) and turn.finished:
            self.counts["undelivered"] += 1

    def _require_open(self) -> None:
        if self._over.is_set():
            raise Refusal(410, "session_over", "this session is over; its samples are on their way to training")

    async def _write(self, turn: Turn, request: ChatRequest, telling: Telling | None) -> None:
        num_aborts = 0
        while True:
            await self._has_engine.wait()
            self._require_open()
            engine = self._engine
            params = {
                **self._params,
                "max_new_tokens": self._room(turn, request),
                "stop": [*self._params["stop"], *request.stop],
            }
            if params["max_new_tokens"] <= 0:  # nothing is left of a turn that was aborted and comes back
                turn.sample.status = Status.TRUNCATED
                return
            streams: dict[str, Any] = {}
            if telling is not None:
                begun = turn.generated
                streams["on_tokens"] = lambda tokens, begun=begun: telling.read([*begun, *tokens])
            asked = engine.generate(turn.sample.tokens, params, session_id=self.prototype.session_id, **streams)
            generation = await self._unless_over(asyncio.ensure_future(asked))
            generation = self.trajectories.up_to_stop(turn, generation, params["stop"])
            turn.extend(generation)
            if generation.status is not Status.ABORTED:
                return
            if self._stopped is not None and self._stopped.done():
                if self._engine is engine:
                    self._has_engine.clear()
                continue
            num_aborts += 1
            if num_aborts > MAX_ABORTS:
                raise self._failed(EngineError(f"a generation of an agent was aborted {num_aborts} times"))

    async def _unless_over(self, task: asyncio.Task[Any]) -> Any:
        self._generations.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            self._require_open()
            raise
        except SlimeError as error:
            raise self._failed(error) from None
        finally:
            self._generations.discard(task)

    def _failed(self, error: SlimeError) -> Refusal:
        """Note what ends the session, and with it the run; the agent gets an HTTP error."""
        self._error = self._error or error
        self.end(Outcome(error=str(error)))
        return Refusal(500, "engine_error", str(error))

    def _room(self, turn: Turn, request: ChatRequest) -> int:
        """Tokens that the turn may still have."""
        tokens = len(turn.sample.tokens)
        room: int = min(self._params["max_new_tokens"] - turn.sample.response_length, self._context_tokens - tokens)
        return room if request.max_tokens is None else min(room, request.max_tokens - (tokens - turn.start))

    def _reply(self, turn: Turn, request: ChatRequest) -> Reply:
        tokens = turn.generated
        ended = turn.sample.status is not Status.TRUNCATED
        ends_with_special = bool(tokens) and ended and tokens[-1] in self._turn_ends
        raw_text = self.trajectories.decode(tokens[:-1] if ends_with_special else tokens)
        shown, stop_string = cut_at_stop(raw_text, request.stop)
        if request.keep_stop:
            shown = raw_text
        content, calls = parse_tool_calls(shown) if request.tools else (shown, [])
        finish = "tool_calls" if calls else "stop" if ended else "length"
        logprobs = turn.sample.logprobs[len(turn.sample.logprobs) - len(tokens) :]
        return Reply(content, calls, finish, stop_string, tokens, [float(x) for x in logprobs], turn.start, raw_text)

    def _cut_short(self, *trajectories: Trajectory) -> None:
        """Mark conversations that would have gone on."""
        for trajectory in trajectories:
            trajectory.sample.status = Status.TRUNCATED

    # --- samples -------------------------------------------------------------------------------------------------
    def _claim(self, sample: Sample) -> int | None:
        """Which conversation a sample is, after its loss mask, with which it came back, is taken over."""
        trajectory = self._trajectory_of(sample)
        if trajectory is None:
            return None
        known = [trajectory.sample]
        if trajectory.latest is not None and trajectory.latest.before is not None:
            known.append(trajectory.latest.before.sample)
        for own in known:
            count = min(own.response_length, sample.response_length)
            own.loss_mask = np.concatenate([own.loss_mask[:count] & sample.loss_mask[:count], own.loss_mask[count:]])
        self._claimed.add(trajectory.number)
        return trajectory.number

    def _trajectory_of(self, sample: Sample) -> Trajectory | None:
        number = sample.metadata.get(TRAJECTORY_KEY) if self.knows(sample) else None
        return next((t for t in self.trajectories.all if t.number == number), None)

    def _taken(self, mine: int | None) -> list[Trajectory]:
        """The conversations that this call returns: its own, and those that no call has claimed."""
        taken = [t for t in self.trajectories.all if t.number == mine or t.number not in self._claimed]
        self._claimed |= {trajectory.number for trajectory in taken}
        return taken

    async def _parked(self, engine: Any, mine: int | None, branch: bool) -> list[Sample]:
        """The samples so far, ABORTED; when the engine has answered what was under way."""
        if self._engine is engine:
            self._has_engine.clear()
        if self._generations:
            await asyncio.wait(list(self._generations))
        if self._error is not None:
            raise self._error
        samples = [_numbered(trajectory) for trajectory in self._taken(mine)]
        if not samples and not branch:
            samples = [self.prototype.clone()]
        for sample in samples:
            sample.status = Status.ABORTED
            sample.metadata[SESSION_KEY] = self.id
        return samples

    def _samples(self, mine: int | None, branch: bool) -> list[Sample]:
        outcome = self.outcome or Outcome()
        for trajectory in list(self.trajectories.all):
            if trajectory.open and trajectory.latest is not None:  # its request is being refused
                self.trajectories.undo(trajectory.latest)
        samples = [_numbered(trajectory) for trajectory in self._taken(mine) if trajectory.num_turns]
        failure = self._failure(outcome)
        if branch and (failure is not None or not samples):
            return []
        if failure is not None or not samples:
            sample = samples[0] if samples else self.prototype.clone()
            sample.fail(failure or "the only answer of one of its conversations did not reach the agent")
            return [sample]
        graded = self.trajectories.answered[-1].number
        for sample in samples:
            sample.shares_reward = sample.metadata[TRAJECTORY_KEY] != graded
            self._grade(sample, outcome)
        return samples

    def _failure(self, outcome: Outcome) -> str | None:
        if outcome.error is not None and self._limit_hit is None:
            return outcome.error
        if not self.trajectories.answered:
            return outcome.error or self._limit_hit or "the agent ended without a single answered request"
        return None

    def _grade(self, sample: Sample, outcome: Outcome) -> None:
        """Give the sample the agent's reward, or the text that it is graded by."""
        if outcome.response is not None:
            sample.response = outcome.response
        if outcome.reward is not None:
            sample.reward = outcome.reward
            sample.rewards["gateway"] = outcome.reward
        sample.rewards |= {f"gateway/{key}": value for key, value in outcome.rewards.items()}


def is_branch(sample: Sample) -> bool:
    """Whether a sample waits for a session that another one, its rollout's first, waits for too."""
    return sample.status is Status.ABORTED and sample.index != sample.rollout_index


def _numbered(trajectory: Trajectory) -> Sample:
    sample = trajectory.sample.clone()
    sample.metadata[TRAJECTORY_KEY] = trajectory.number
    sample.metadata["round_number"] = trajectory.num_turns
    return sample
