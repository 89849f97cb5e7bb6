"""Worker processes for plain `def` rewards: a grader that hangs, crashes or eats memory harms only its own sample."""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from typing import Any

from slime_core.options import Options
from slime_core.rollout.reward_process import Worker, fork_context, start_process
from slime_core.rollout.reward_worker import Reply, reason_of

logger = logging.getLogger(__name__)

BATCH_S = 0.02
"""A message holds about so much work: cheap graders share one between many samples, dear ones wait for no other."""

MAX_BATCH_JOBS = 64
MAX_BATCH_BYTES = 1 << 20
TICK_S = 0.05
"""How often running graders are looked at."""

STUCK_S = 0.5
"""What waits behind a grader that takes longer is given to other workers."""

ABANDONED_S = 0.2
"""A grader whose caller is gone is killed when it runs longer: most have finished by then."""

MAX_FAILED_STARTS = 3


class RewardFailure(Exception):
    """Why a grader gave no reward."""


@dataclass(eq=False)
class Job:
    """One call of a grader. After a retry two workers may hold it; the first reply counts."""

    number: int
    hook: str
    reference: str
    subject: dict[str, Any]
    outcome: asyncio.Future[Any]
    pickled: bytes = b""
    """The call as it is sent, made when it is sent: a thousand samples that finish at once are not pickled at once."""
    waiting: bool = True
    """Whether it is in the pool's queue."""
    holder: Worker | None = None
    """Which worker was sent it last."""

    @property
    def kind(self) -> tuple[str, str]:
        """Calls of one kind take about the same time."""
        return self.hook, self.reference


class RewardPool:
    """Grades in `--reward-workers` processes, each call killed after `--reward-timeout-s`.

    Built and used inside a running event loop, which it never blocks.
    """

    def __init__(self, args: Options, references: Sequence[str]) -> None:
        self._args = args
        self._references = references
        self._timeout_s: float = args.reward_timeout_s
        self._loop = asyncio.get_running_loop()
        self._context = fork_context()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward workers")
        self._workers: set[Worker] = set()
        self._unadopted: set[tuple[ForkServerProcess, socket.socket]] = set()
        """Started in the thread, and not yet known to the loop."""
        self._waiting: deque[Job] = deque()
        self._seconds: dict[tuple[str, str], float] = {}
        """Moving average of what a call of each grader takes."""
        self._num_jobs = 0
        self._failed_starts = 0
        self._broken: str | None = None
        self._closed = False
        self._dispatching: asyncio.Handle | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._starts = {self._loop.create_task(self._start_worker()) for _ in range(args.reward_workers)}

    async def grade(self, hook: str, reference: str, subject: dict[str, Any]) -> Any:
        """The result of a plugin's hook. Cancelling the call kills the grader unless it ends at once.

        Raises:
            RewardFailure: when the plugin raised, took too long, or its process died.
        """
        if self._broken is not None:
            raise RewardFailure(self._broken)
        self._num_jobs += 1
        job = Job(self._num_jobs, hook, reference, subject, self._loop.create_future())
        self._waiting.append(job)
        self._dispatch_soon()
        return await job.outcome

    def close(self) -> None:
        """Kill the workers. What waits is cancelled. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        for handle in (self._dispatching, self._ticking):
            if handle is not None:
                handle.cancel()
        for task in self._starts:
            task.cancel()
        self._thread.submit(lambda: None).result()  # a start under way ends first
        for process, connection in self._unadopted:
            process.kill()
            process.join(5.0)
            connection.close()
        for worker in list(self._workers):
            for job in worker.jobs:
                job.outcome.cancel()
            worker.kill()
            worker.process.join(5.0)
        for job in self._waiting:
            job.outcome.cancel()
        self._thread.shutdown()

    # --- workers -----------------------------------------------------------------------------------------------------
    async def _start_worker(self) -> None:
        try:
            started = await asyncio.shield(self._loop.run_in_executor(self._thread, self._start))
        except Exception as error:
            self._failed_start(f"no worker process could be started: {reason_of(error)}")
            self._replace_worker()
            return
        if started is None:
            return
        process, connection = started
        worker = Worker(process, self._on_reply, self._on_end)
        self._workers.add(worker)
        self._unadopted.discard(started)
        await self._loop.create_unix_connection(lambda: worker, sock=connection)

    def _start(self) -> tuple[ForkServerProcess, socket.socket] | None:
        """Runs in the thread."""
        if self._closed:
            return None
        started = start_process(self._context, self._args, self._references)
        self._unadopted.add(started)
        return started

    def _replace_worker(self) -> None:
        if not self._closed and self._broken is None:
            task = self._loop.create_task(self._start_worker())
            self._starts.add(task)
            task.add_done_callback(self._starts.discard)

    def _on_reply(self, worker: Worker, reply: Reply) -> None:
        if reply.number < 0:
            if reply.failure is not None:
                self._break(reply.failure)
                return
            self._failed_starts = 0
            worker.ready = True
            self._dispatch_soon()
            return
        job = worker.jobs.popleft()
        known = self._seconds.get(job.kind, reply.seconds)
        self._seconds[job.kind] = 0.8 * known + 0.2 * reply.seconds
        _settle(job, reply.result, reply.failure)
        if reply.retires:
            self._drop(worker)
        elif not worker.jobs:
            self._dispatch_soon()

    def _on_end(self, worker: Worker) -> None:
        """A worker's process ended without being told to."""
        if worker not in self._workers or self._closed:
            return
        running = worker.jobs.popleft() if worker.jobs else None
        was_ready = worker.num_replies > 0
        self._drop(worker)
        task = self._loop.create_task(self._note_death(worker, running, was_ready))
        self._starts.add(task)
        task.add_done_callback(self._starts.discard)

    async def _note_death(self, worker: Worker, running: Job | None, was_ready: bool) -> None:
        reason = await self._loop.run_in_executor(self._thread, worker.how_it_died)
        if running is not None:
            _settle(running, None, reason)
        if not was_ready:
            self._failed_start(f"the workers cannot start: {reason}")

    def _drop(self, worker: Worker) -> None:
        """Kill a worker, give what it holds to others, and start another in its place."""
        self._workers.discard(worker)
        worker.kill()
        self._take_back(worker)
        self._replace_worker()

    def _take_back(self, worker: Worker, skip: int = 0) -> None:
        """Queue again, in front, what a worker was sent, except its first `skip` jobs and those another worker has."""
        for job in reversed(list(worker.jobs)[skip:]):
            if job.holder is worker and not job.waiting and not job.outcome.done():
                job.waiting = True
                self._waiting.appendleft(job)
        if self._broken is not None:
            self._break(self._broken)
        self._dispatch_soon()

    def _failed_start(self, reason: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            self._break(reason)

    def _break(self, reason: str) -> None:
        """No worker can ever grade: fail what waits and what comes."""
        if self._broken is None:
            logger.error("rewards cannot be graded: %s", reason)
        self._broken = reason
        for job in self._waiting:
            _settle(job, None, reason)
        self._waiting.clear()

    # --- jobs --------------------------------------------------------------------------------------------------------
    def _dispatch_soon(self) -> None:
        """After the callbacks that are due, so that samples which finish together travel together."""
        if self._dispatching is None and self._waiting and not self._closed:
            self._dispatching = self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatching = None
        idle = [worker for worker in self._workers if worker.idle]
        while idle and self._waiting:
            share = -(-len(self._waiting) // len(idle))
            if batch := self._next_batch(share):
                worker = idle.pop()
                for job in batch:
                    job.holder = worker
                worker.send(batch)
        if self._ticking is None and any(worker.jobs for worker in self._workers):
            self._ticking = self._loop.call_later(TICK_S, self._tick)

    def _next_batch(self, share: int) -> list[Job]:
        """Up to `share` waiting jobs that take about BATCH_S together."""
        batch: list[Job] = []
        seconds, size = 0.0, 0
        while self._waiting and len(batch) < min(share, MAX_BATCH_JOBS):
            job = self._waiting[0]
            if job.outcome.done() or not _pickled(job):
                self._waiting.popleft()
                continue
            seconds += self._seconds.get(job.kind, BATCH_S / 4)
            size += len(job.pickled)
            if batch and (seconds > BATCH_S or size > MAX_BATCH_BYTES):
                break
            self._waiting.popleft()
            job.waiting = False
            batch.append(job)
        return batch

    def _tick(self) -> None:
        """Look at every running grader."""
        self._ticking = None
        now = self._loop.time()
        for worker in [worker for worker in self._workers if worker.jobs]:
            job, seconds = worker.jobs[0], now - worker.running_since
            abandoned = job.outcome.done() and seconds > ABANDONED_S
            if (seconds > self._timeout_s or abandoned) and self._no_reply_since_suspected(worker):
                worker.jobs.popleft()
                _settle(job, None, f"took longer than {self._timeout_s:g} s and was killed")
                self._drop(worker)
            elif seconds > STUCK_S:
                self._take_back(worker, skip=1)
        if any(worker.jobs for worker in self._workers):
            self._ticking = self._loop.call_later(TICK_S, self._tick)

    def _no_reply_since_suspected(self, worker: Worker) -> bool:
        """False at first sight: after a stall of the loop the reply may have come, and only wait to be read."""
        suspected, worker.suspected_at = worker.suspected_at, worker.num_replies
        return suspected == worker.num_replies


def _pickled(job: Job) -> bool:
    """Whether the call could be made ready to be sent; if not, it has failed."""
    if not job.pickled:
        try:
            job.pickled = pickle.dumps((job.hook, job.reference, job.subject), pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            _settle(job, None, f"cannot be sent the sample: {reason_of(error)}")
            return False
    return True


def _settle(job: Job, result: Any, failure: str | None) -> None:
    if job.outcome.done():
        return
    if failure is None:
        job.outcome.set_result(result)
    else:
        job.outcome.set_exception(RewardFailure(failure))
