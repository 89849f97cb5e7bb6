"""The engine: a scheduler on a thread of its own, and the thread-safe door to it.

Everything that touches the model or the queues runs on the model's thread, between two steps: callers put functions
into an inbox and get futures. Finished requests, and streams, are delivered in batches, once a step.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from slime_core.engines.checksum import model_checksums
from slime_core.engines.embedded.batch import abort_reason
from slime_core.engines.embedded.language_model import LanguageModel
from slime_core.engines.embedded.request import Output, Request, SamplingParams
from slime_core.engines.embedded.sampling import spread_seed
from slime_core.engines.embedded.scheduler import Finished, Scheduler
from slime_core.engines.embedded.weights import match_to_model, read_checkpoint, swap

PAUSE_MODES = ("abort", "in_place", "retract")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Load:
    """How busy an engine is."""

    running: int
    waiting: int
    running_tokens: int
    paused: str | None


class Engine:
    """Serves one model from a thread of its own.

    deliver is called on that thread with the requests that ended in a step and those that stream; without it a
    request's `reply` must be a concurrent future, which gets the output. Start with start(), end with stop().
    """

    def __init__(
        self,
        language_model: LanguageModel,
        max_rows: int = 256,
        max_kv_bytes: int = 4 << 30,
        seed: int | None = None,
        deliver: Callable[[list[Finished]], None] | None = None,
    ) -> None:
        self.language_model = language_model
        self.max_rows = max_rows
        self.failure: str | None = None
        self.paused: str | None = None
        self.max_kv_bytes = max_kv_bytes
        self._scheduler = self._new_scheduler()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pending_updates: list[Callable[[], None]] = []
        self._deliver = deliver or resolve_replies
        self._random = random.Random(seed)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self.language_model, self.max_rows, self.max_kv_bytes)

    # -- from any thread -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the model's thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Abort what runs and end the thread, after the step it is in."""

        def halt() -> None:
            self._scheduler.abort(lambda request: True, abort_reason("the engine was stopped"))
            self._stopping = True

        self._inbox.put(halt)
        self._thread.join(timeout_s)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; their outputs arrive through `deliver`."""
        self._inbox.put(lambda: self._scheduler.waiting.extend(requests))

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[Output]:
        """Generate for token-id prompts and wait; for use inside one process. Outputs in the prompts' order."""
        futures: list[Future[Output]] = [Future() for _ in prompts]
        requests = [
            self.make_request(prompt, params, rid=str(index), reply=future)
            for index, (prompt, future) in enumerate(zip(prompts, futures, strict=True))
        ]
        self.submit(requests)
        return [future.result() for future in futures]

    def make_request(
        self, prompt: list[int], params: SamplingParams, rid: str, reply: Any, copy: int = 0, **more: Any
    ) -> Request:
        """Build a request: its limit within the context, and its seed (copy i of a seeded request uses seed + i)."""
        room = self.language_model.context_length - len(prompt)
        seed = self._random.getrandbits(63) if params.sampling_seed is None else params.sampling_seed + copy
        limit = room if params.max_new_tokens is None else params.max_new_tokens
        return Request(rid, prompt, params, limit, spread_seed(seed), reply=reply, **more)

    def abort(self, rid: str | None = None, request: Request | None = None) -> Future[None]:
        """Abort the requests of that name, or that request, or all; what they have generated is their answer."""
        if request is not None:
            return self._call(lambda: self._scheduler.abort(lambda other: other is request))
        return self._call(
            lambda: self._scheduler.abort(lambda other: rid is None or rid in (other.rid, other.parent_rid))
        )

    def pause(self, mode: str) -> Future[None]:
        """Stop generating after the current step: abort everything, keep it as it is, or retract it to the queue."""

        def act() -> None:
            self.paused = mode
            if mode == "abort":
                self._scheduler.abort(lambda request: True)
            elif mode == "retract":
                self._scheduler.retract()

        return self._call(act)

    def resume(self) -> Future[None]:
        """Go on after a pause."""

        def act() -> None:
            self.paused = None

        return self._call(act)

    def flush_cache(self) -> Future[bool]:
        """Forget cached keys and values; False while requests need them."""

        def act() -> bool:
            scheduler = self._scheduler
            busy = len(scheduler.batch) > 0 or (len(scheduler.waiting) > 0 and self.paused is None)
            if not busy:
                scheduler.cache.release()
            return not busy

        return self._call(act)

    def load(self) -> Future[Load]:
        """How many requests run and wait."""

        def act() -> Load:
            batch = self._scheduler.batch
            tokens = int(batch.length[: len(batch)].sum())
            return Load(len(batch), len(self._scheduler.waiting), tokens, self.paused)

        return self._call(act)

    @property
    def weight_version(self) -> str:
        """The name of the weights in use."""
        return self._scheduler.weight_version

    def set_weight_version(self, version: str, abort_all: bool = False) -> Future[None]:
        """Rename the weights in use."""

        def act() -> None:
            if abort_all:
                self._scheduler.abort(lambda request: True)
            self._scheduler.set_weight_version(version)

        return self._call(act)

    def checksums(self) -> Future[dict[str, str]]:
        """Checksums of the live weights by Hugging Face name."""
        return self._call(lambda: model_checksums(self.language_model.model.state_dict()))

    def update_weights(self, path: str, version: str | None, abort_all: bool = False) -> Future[None]:
        """Read a checkpoint (on the caller's thread) and swap it in as `replace_weights` does."""
        return self.replace_weights(read_checkpoint(path), version, abort_all)

    def replace_weights(
        self, tensors: dict[str, torch.Tensor], version: str | None, abort_all: bool = False
    ) -> Future[None]:
        """Swap in a whole set of weights as soon as that is safe.

        Safe is: paused, or nothing running; until then nothing new is admitted. Raises WeightUpdateError at once if
        they are not the model's; the old weights then stay in use.
        """
        pairs = match_to_model(tensors, self.language_model.model)
        done: Future[None] = Future()

        def apply() -> None:
            swap(pairs)
            if version is not None:
                self._scheduler.set_weight_version(version)
            done.set_result(None)

        def arrive() -> None:
            if abort_all:
                self._scheduler.abort(lambda request: True)
            self._pending_updates.append(apply)

        self._inbox.put(arrive)
        return done

    def _call(self, act: Callable[[], T]) -> Future[T]:
        """Run a function on the model's thread, between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(act())
            except BaseException as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future

    # -- on the model's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception as error:  # whatever broke, nobody may wait for ever
                self._fail(f"{type(error).__name__}: {error}")

    def _turn(self) -> None:
        self._read_inbox(wait=not (self._can_step() or self._pending_updates))
        self._apply_updates()
        progress: list[Finished] = []
        if self._can_step() and not self._stopping:
            self._scheduler.step()
            progress = self._scheduler.progress()
        if outputs := progress + self._scheduler.take_finished():
            self._deliver(outputs)

    def _fail(self, message: str) -> None:
        """Answer everybody with the error and start over with an empty scheduler."""
        self.failure = message
        old, self._scheduler = self._scheduler, self._new_scheduler()
        self._scheduler.weight_version = version = old.weight_version
        output = Output([], [], abort_reason(f"the engine failed: {message}", 500), version, [], time.time())
        lost = [(request, output) for request in old.unanswered()]
        self._deliver(old.take_finished() + lost)

    def _can_step(self) -> bool:
        return self.paused is None and self._scheduler.has_work()

    def _read_inbox(self, wait: bool) -> None:
        """Run what callers asked for; wait for the first of it when there is nothing else to do."""
        try:
            while True:
                self._inbox.get(block=wait)()
                wait = False
        except queue.Empty:
            return

    def _apply_updates(self) -> None:
        """Swap waiting weights in if nothing runs or all is paused; else admit nothing new so that it drains."""
        if self._pending_updates and (self.paused is not None or len(self._scheduler.batch) == 0):
            updates, self._pending_updates = self._pending_updates, []
            for update in updates:
                update()
        self._scheduler.admitting = not self._pending_updates


def resolve_replies(finished: list[Finished]) -> None:
    """Deliver outputs to requests whose reply is a concurrent future."""
    for request, output in finished:
        request.reply.set_result(output)
