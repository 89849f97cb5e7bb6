"""The engines of a run: watched while it goes on, and replaced when they die or hang, without the run noticing."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from slime_core.cluster.placement import Seat
from slime_core.errors import EnginesLostError, WeightsDifferError
from slime_core.options import Options

MAX_FAILED_STARTS = 5
ACTOR_PATIENCE_S = 10.0
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 60.0


class State(Enum):
    """An engine goes down this list, and back to the top when it dies."""

    DOWN = auto()
    """Waits to be started again."""
    STARTING = auto()
    READY = auto()
    """Runs, with the weights that it was started with."""
    JOINING = auto()
    """Is given the weights that the others have."""
    ADMITTED = auto()
    """The router learns of it."""
    SERVING = auto()


class Host(Protocol):
    """What the fleet asks of the run; each call gives a reference to wait for."""

    def new_engine(self, index: int, seat: Seat) -> Any:
        """An actor for an engine that is started later."""

    def end_engine(self, index: int, actor: Any) -> None:
        """End it, wherever it has parts; it may be gone already."""

    def start_engine(self, actor: Any, index: int, again: bool) -> Any:
        """Start its server; the result is the URL."""

    def send_current_weights(self, url: str) -> Any | None:
        """Give a new engine the weights that the others have; None while nobody has those."""

    def admit(self, url: str) -> Any:
        """Let the router send requests to it."""

    def dismiss(self, url: str) -> None:
        """Let it send none, soon."""


@dataclass
class Engine:
    """One seat and who sits there now."""

    index: int
    seat: Seat
    actor: Any
    state: State = State.STARTING
    url: str = ""
    call: Any = None
    """What is under way: the start, the weights or the admission."""
    check: Any = None
    """The question how it is, while it serves or is given weights, over which it may hang."""
    checked_at: float = 0.0
    num_failed_starts: int = 0
    start_at: float = 0.0
    """When it is, or was, to be started again."""
    down_since: float | None = None


class Fleet:
    """Keeps `num_engines` engines serving. `poll` does all the work and never blocks.

    An engine that died or hangs is dismissed from the router at once, its process ended, a new one started, given the
    weights, and admitted. The requests that it held are sent again by the client.
    """

    def __init__(self, args: Options, host: Host, seats: Sequence[Seat], name: str = "engine") -> None:
        """`name` says whose engines they are, as in EngineServer; metrics of a frozen model carry it."""
        self._args, self._host, self.name = args, host, name
        self._prefix = "engines/" if name == "engine" else f"engines/{name}/"
        self.engines = [Engine(index, seat, host.new_engine(index, seat)) for index, seat in enumerate(seats)]
        self._patience_s = 2 * args.engine_health_timeout_s + ACTOR_PATIENCE_S
        # its actor may wait for a machine that is gone
        self._longest_start_s = 2 * args.engine_start_timeout_s + ACTOR_PATIENCE_S
        self._messages: list[str] = []
        self._num_restarts = 0
        self._down_s = 0.0
        self._last_problem = ""
        self._none_since: float | None = None

    def start(self) -> list[Any]:
        """Start all; the results are their URLs, for `started`."""
        for engine in self.engines:
            engine.start_at = time.monotonic()
            engine.call = self._host.start_engine(engine.actor, engine.index, again=False)
        return [engine.call for engine in self.engines]

    def started(self, urls: Sequence[str]) -> None:
        """All run, and the router knows them."""
        for engine, url in zip(self.engines, urls, strict=True):
            engine.url, engine.state, engine.call = url, State.SERVING, None

    def urls(self) -> list[str]:
        """Of the engines that can take weights."""
        return [e.url for e in self.engines if e.state in (State.READY, State.ADMITTED, State.SERVING)]

    def any_is(self, *states: State) -> bool:
        """Whether an engine is in one of these states."""
        return any(engine.state in states for engine in self.engines)

    def has_weights(self, urls: Sequence[str]) -> None:
        """The engines of these URLs have the current weights: those that waited for that are admitted."""
        for engine in self.engines:
            if engine.state is State.READY and engine.url in urls:
                engine.state, engine.call = State.ADMITTED, self._host.admit(engine.url)

    def poll(self, paused: bool = False) -> None:
        """Move every engine on as far as it is.

        Args:
            paused: the engines stand still, to be given weights; none is started then.

        Raises:
            WeightsDifferError: when a new engine does not compute what the trainer does.
        """
        for engine in self.engines:
            try:
                self._advance(engine, paused)
            except (RayActorError, RayTaskError) as error:
                if isinstance(error, RayTaskError) and isinstance(error.cause, WeightsDifferError):
                    raise error.cause from None  # another start would not make them the same
                self._lose(engine, _reason(error))

    def finish_checks(self) -> None:
        """Return when no engine is being asked how it is: SGLang does not answer that while it is paused."""
        checks = [engine.check for engine in self.engines if engine.state is State.SERVING and engine.check is not None]
        if checks:
            ray.wait(checks, num_returns=len(checks), timeout=self._patience_s)

    def all_well(self, urls: Sequence[str]) -> bool:
        """Ask these engines how they are, now, and wait for the answers; those that are not well are lost."""
        asked = [
            (engine, engine.actor.check.remote(True, at_once=True)) for engine in self.engines if engine.url in urls
        ]
        for engine, call in asked:
            try:
                ray.get(call, timeout=self._patience_s)
            except (RayActorError, RayTaskError, GetTimeoutError) as error:
                self._lose(engine, _reason(error))
        return set(urls) <= set(self.urls())

    def require(self) -> None:
        """Do nothing while an engine serves, or may again.

        Raises:
            EnginesLostError: when there has been none for --engine-recovery-timeout-s, or none can be started.
        """
        now = time.monotonic()
        if not self.engines or any(engine.state is State.SERVING for engine in self.engines):
            self._none_since = None
            return
        self._none_since = self._none_since or now
        if all(map(self._is_given_up, self.engines)) or now - self._none_since > self._args.engine_recovery_timeout_s:
            raise EnginesLostError(f"no {self.name} is left, and none could be started again: {self._last_problem}")

    def take_messages(self) -> list[str]:
        """What happened since the last call, for the user."""
        messages, self._messages = self._messages, []
        return messages

    def take_metrics(self) -> dict[str, float]:
        """`engines/*`, a frozen model's `engines/NAME/*`: counts and seconds since the last call."""
        now = time.monotonic()
        for engine in self.engines:
            if engine.down_since is not None:
                self._down_s += now - engine.down_since
                engine.down_since = now
        metrics = {
            f"{self._prefix}serving": float(sum(engine.state is State.SERVING for engine in self.engines)),
            f"{self._prefix}restarts": float(self._num_restarts),
            f"{self._prefix}down_s": self._down_s,
        }
        self._num_restarts, self._down_s = 0, 0.0
        return metrics

    def take_actors(self) -> list[Any]:
        """The actors, which are the caller's to end now."""
        actors = [engine.actor for engine in self.engines]
        self.engines = []
        return actors

    def _advance(self, engine: Engine, paused: bool) -> None:
        if engine.state in (State.JOINING, State.SERVING):
            self._watch(engine, paused or engine.state is State.JOINING)
        if engine.call is not None:
            if not _done(engine.call):
                if engine.state is State.STARTING and time.monotonic() - engine.start_at > self._longest_start_s:
                    self._lose(engine, f"it has not started within {self._longest_start_s:g} s")
                return
            call, engine.call = engine.call, None
            self._take(engine, ray.get(call))
        if engine.state is State.DOWN and not paused and time.monotonic() >= engine.start_at:
            engine.state, engine.start_at = State.STARTING, time.monotonic()
            engine.call = self._host.start_engine(engine.actor, engine.index, again=True)
        elif engine.state is State.READY:
            engine.call = self._host.send_current_weights(engine.url)
            if engine.call is not None:
                engine.state = State.JOINING

    def _watch(self, engine: Engine, paused: bool) -> None:
        """Take the answer to how it is, and ask again."""
        if engine.check is not None:
            if not _done(engine.check):
                if time.monotonic() - engine.checked_at > self._patience_s:
                    self._lose(engine, f"its actor has not answered for {self._patience_s:g} s")
                return
            check, engine.check = engine.check, None
            ray.get(check)
        engine.check, engine.checked_at = engine.actor.check.remote(paused), time.monotonic()

    def _take(self, engine: Engine, result: Any) -> None:
        """A call has ended well."""
        if engine.state is State.STARTING:
            engine.url, engine.state = result, State.READY
        elif engine.state is State.JOINING:
            engine.state, engine.call, engine.check = State.ADMITTED, self._host.admit(engine.url), None
        elif engine.state is State.ADMITTED:
            engine.state, engine.num_failed_starts = State.SERVING, 0
            if engine.down_since is not None:
                self._down_s += time.monotonic() - engine.down_since
                engine.down_since = None
            self._messages.append(f"{self.name} {engine.index} serves again")

    def _is_given_up(self, engine: Engine) -> bool:
        """An engine of somebody else's may come back at any time."""
        return engine.num_failed_starts >= MAX_FAILED_STARTS and not self._args.external_engines

    def _lose(self, engine: Engine, reason: str) -> None:
        """End what is left of an engine, and plan its next start."""
        now = time.monotonic()
        served = engine.state is State.SERVING
        self._last_problem = reason
        if engine.url:
            self._host.dismiss(engine.url)
        self._host.end_engine(engine.index, engine.actor)
        engine.url, engine.call, engine.check, engine.state = "", None, None, State.DOWN
        engine.down_since = engine.down_since or now
        if not served:
            engine.num_failed_starts += 1
        if self._is_given_up(engine):
            engine.start_at = math.inf
            self._messages.append(f"{self.name} {engine.index} is given up after {MAX_FAILED_STARTS} starts: {reason}")
            return
        doublings = min(engine.num_failed_starts, 10)
        backoff = FIRST_BACKOFF_S * 2**doublings if doublings else 0.0
        engine.start_at = now + min(backoff, LONGEST_BACKOFF_S)
        engine.actor = self._host.new_engine(engine.index, engine.seat)
        self._num_restarts += 1
        self._messages.append(f"{self.name} {engine.index} is started again: {reason.splitlines()[0]}")


def _done(call: Any) -> bool:
    return bool(ray.wait([call], timeout=0)[0])


def _reason(error: Exception) -> str:
    if isinstance(error, RayTaskError) and error.cause is not None:
        return str(error.cause)
    lines = str(error).strip().splitlines()
    return f"its process died ({lines[0].rstrip('.')})" if lines else type(error).__name__
