"""The processes of a run, on Ray: started together, called by name, gone when the run ends, however it ends."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import placement_group

from slime_core.cluster.actors import POLICY, RolloutActor, RoundRefs
from slime_core.cluster.fleet import Fleet, State
from slime_core.cluster.hosts import CurrentWeights, EngineHost, in_seat, no_weights
from slime_core.cluster.overlap import Overlap
from slime_core.cluster.placement import choose_device, data_parallel_ranks, lent_gpus, plan, threads_each
from slime_core.cluster.ray_start import first_line, start_ray, start_reaper, watch
from slime_core.cluster.trainer_actor import TrainerActor
from slime_core.engines.frozen import options_of
from slime_core.errors import ClusterError, EngineError, SlimeError, WeightSyncError
from slime_core.options import Options
from slime_core.rollout.tally import Tally

PLACEMENT_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.2

OnProgress = Callable[[Tally, list[str]], None]


class Cluster:
    """Engines, router, rollout manager and trainers, all started; use it as a context manager.

    Raises:
        SlimeError: when a part does not start; nothing is left running then.
    """

    def __init__(self, args: Options, run_dir: Path) -> None:
        self._args = args
        self._run_dir = run_dir
        self._fleet: Fleet | None = None
        self._frozen: list[Fleet] = []
        self._version = -1
        """Of the weights that the engines have."""
        self._trainer_version: int | None = -1
        """Of the trainer's, which are later ones between training and the next update; None while it trains."""
        self._trainers: list[Any] = []
        self._overlap: Overlap | None = None
        self._manager: Any = None
        self._group: Any = None
        self._answered = 0.0
        self._reaper: subprocess.Popen[str] | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- the run's verbs ----------------------------------------------------------------------------------------------
    def start_rollout(self, step: int, version: int) -> Any:
        """Begin to collect the round of `step` under the engines' weights `version`; `wait` gives its RoundRefs."""
        return self._manager.rollout.remote(step, version)

    def start_evaluation(self, step: int) -> Any:
        """Begin to evaluate under the current weights, those after `step` rounds; `wait` gives the metrics."""
        return self._manager.evaluate.remote(step)

    def start_freeing(self) -> Any:
        """Begin to wait for the end of the requests that a round did not need; `wait` returns then."""
        return self._manager.engines_free.remote()

    def wait(self, started: Any, on_progress: OnProgress) -> Any:
        """The result of what was started; `on_progress` is called a few times a second."""
        return self._watch(started, on_progress)

    def train(self, step: int, collected: RoundRefs) -> dict[str, float]:
        """Train on a round, every rank on its shard; without trainers nothing happens."""
        if not self._trainers:
            return {}
        if self._args.offload_engines:
            self._settle_fleet(State.STARTING)  # it would take memory that the trainers need
            self._tell_engines(lambda urls: [self._trainers[0].release_engines.remote(urls)])
        shards = [collected.shards[share] for share in data_parallel_ranks(self._args)]
        calls = [trainer.train.remote(step, [shard]) for trainer, shard in zip(self._trainers, shards, strict=True)]
        self._trainer_version = None
        metrics = self._all(calls, paused=self._args.offload_engines)[0]
        self._trainer_version = step + 1
        return metrics

    def send_weights(self, version: int) -> dict[str, float]:
        """Give every engine the trainer's weights as `version`, verified.

        An engine that dies meanwhile is left out, and the others are sent them again.
        """
        if not self._trainers or self._fleet is None or not self._fleet.engines:
            return {}
        urls, metrics = self._tell_engines(
            lambda urls: [trainer.send_weights.remote(version, urls) for trainer in self._trainers]
        )
        self._version = self._trainer_version = version
        self._fleet.has_weights(urls)
        return metrics

    def engine_metrics(self) -> dict[str, float]:
        """What happened to the engines since the last call."""
        return {name: value for fleet in self._fleets() for name, value in fleet.take_metrics().items()}

    def abandon(self) -> None:
        """Give up the round and the evaluation under way; their groups wait for a later round."""
        self._get(self._manager.abandon.remote())

    def save(self, directory: Path, num_rounds: int) -> None:
        """Write everything that a run needs to go on after `num_rounds` rounds; nothing may be under way.

        Under `--async-save` the trainers only begin to; `saved` tells when they are done.
        """
        self._get([a.save.remote(directory, num_rounds) for a in [*self._trainers, self._manager]])

    def saved(self, *, wait: bool) -> bool:
        """Whether the trainers have written all of the last `save`; waits until they have, or looks."""
        return all(self._get([trainer.saved.remote(wait) for trainer in self._trainers]))

    def export(self, directory: Path) -> None:
        """Write the model as transformers reads it; without trainers there is none."""
        self._get([trainer.export.remote(directory) for trainer in self._trainers])

    def load(self, directory: Path) -> None:
        """Go on from `save`."""
        self._get([a.load.remote(directory) for a in [*self._trainers, self._manager]])

    def close(self) -> None:
        """Stop every process of the run; Ray too, if the run started it."""
        engines = [actor for fleet in self._fleets() for actor in fleet.take_actors()]
        actors = [a for a in [self._manager, *engines, *self._trainers] if a is not None]
        self._manager, self._fleet, self._overlap = None, None, None
        self._frozen, self._trainers = [], []
        if not ray.is_initialized():
            return
        with contextlib.suppress(Exception):  # a broken actor must not keep the others alive
            ray.wait([a.stop.remote() for a in actors], num_returns=len(actors), timeout=STOP_TIMEOUT_S)
        for actor in actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        ray.shutdown()
        if self._reaper is not None:
            self._reaper.communicate("done\n")
            self._reaper = None

    # --- start --------------------------------------------------------------------------------------------------------
    def _start(self) -> None:
        args = self._args
        layout_size = len(plan(args, use_gpus=False).bundles)
        on_sigterm = signal.getsignal(signal.SIGTERM)
        start_ray(args, layout_size)
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own handler would abort without cleaning up
        self._reaper = start_reaper()
        device = choose_device(args, ray.cluster_resources().get("GPU", 0))
        layout = plan(args, use_gpus=device == "cuda")
        self._group = placement_group(layout.bundles, strategy="PACK")
        if not self._group.wait(PLACEMENT_TIMEOUT_S):
            raise ClusterError(
                f"Ray cannot place the run: it needs the bundles {layout.bundles} and the cluster has "
                f"{ray.cluster_resources()}. Ask for fewer --num-engines and --num-trainers."
            )
        self._manager = RolloutActor.remote()  # type: ignore[attr-defined]
        num_engines = len(layout.engines) + sum(map(len, layout.frozen.values()))
        # A lone engine chooses by its model's size: for a tiny one a single thread is faster.
        threads = args.engine_threads or (0 if num_engines == 1 else threads_each(None, num_engines))
        self._trainers = [in_seat(TrainerActor, self._group, seat) for seat in layout.trainers]
        lend = any(layout.lenders)
        places = self._get([trainer.gpus.remote() for trainer in self._trainers]) if lend else []
        gpus = lent_gpus(layout.lenders, places, args.weight_transport) if lend else []
        host = self._host(args, POLICY, threads, self._send_current_weights, gpus, layout.followers)
        self._fleet = Fleet(args, host, layout.engines, POLICY)
        for model in args.frozen_model:
            own = options_of(args, model)
            host = self._host(own, model.name, threads, no_weights)
            self._frozen.append(Fleet(own, host, layout.frozen[model.name], model.name))
        serving = {fleet.name: fleet.start() for fleet in self._fleets()}
        started = [call for calls in serving.values() for call in calls]
        loading = [] if lend else self._start_trainers(device)
        self._get(started)
        if lend:  # SGLang sizes its cache by the memory that it finds
            loading = self._start_trainers(device)
        urls: dict[str, list[str]] = {name: self._get(calls) for name, calls in serving.items()}
        policy, num_shards = urls.pop(POLICY), len(set(data_parallel_ranks(args)))
        self._get(self._manager.start.remote(args, policy, urls, num_shards, self._run_dir))
        self._fleet.started(policy)
        for fleet in self._frozen:
            fleet.started(urls[fleet.name])
        self._get(loading)
        if self._trainers:
            watch(self._reaper, *self._get(self._trainers[0].connect.remote(args, self._run_dir)))
        if args.overlap_logprobs:
            self._overlap = Overlap(self._manager, self._trainers, data_parallel_ranks(args), self._get)

    def _host(
        self, args: Options, name: str, threads: int, send_weights: CurrentWeights, *places: Sequence[Sequence[Any]]
    ) -> EngineHost:
        return EngineHost(args, name, self._run_dir, threads, self._group, self._manager, send_weights, *places)

    def _start_trainers(self, device: str) -> list[Any]:
        if not self._trainers:
            return []
        address = self._get(self._trainers[0].reserve_address.remote(self._args.ray_address is None))
        world_size = len(self._trainers)
        threads = threads_each(self._args.trainer_threads, world_size)
        return [
            trainer.start.remote(self._args, rank, world_size, address, device, threads)
            for rank, trainer in enumerate(self._trainers)
        ]

    def _fleets(self) -> list[Fleet]:
        """The policy's and those of frozen models."""
        return ([] if self._fleet is None else [self._fleet]) + self._frozen

    def _send_current_weights(self, url: str) -> Any | None:
        """Give an engine the weights of the others; None when the trainer has them no more, or they have none.

        Where there are no others, a round under way would wait for ever: it goes on under newer weights.
        """
        if not self._trainers:
            return ray.put(None)
        others = self._fleet is not None and self._fleet.any_is(State.JOINING, State.ADMITTED, State.SERVING)
        version = self._trainer_version
        if version is None or self._version < 0 or (others and version != self._version):
            return None
        calls = [trainer.send_weights_to.remote(version, url) for trainer in self._trainers]
        return calls[0]

    def _tell_engines(self, call: Callable[[list[str]], list[Any]]) -> tuple[list[str], dict[str, float]]:
        """Let trainers tell all engines something under which they stand still; whom it told, and its answer.

        One that dies meanwhile is left out, and the others are told again. Somebody else's engine may have been started
        again unseen, so those are told twice before it counts.
        """
        tries = 2 if self._args.external_engines else 1
        while True:
            self._settle_fleet(State.JOINING, State.ADMITTED)  # the router looks at an engine before it takes it
            urls = self._wait_for_engines()
            try:
                return urls, self._all(call(urls), paused=True)[0]
            except (EngineError, WeightSyncError):
                if self._fleet is None or self._fleet.all_well(urls):
                    tries -= 1
                    if not tries:
                        raise

    def _settle_fleet(self, *states: State) -> None:
        """Return when no engine is asked how it is, nor in one of these states."""
        if self._fleet is None:
            return
        self._fleet.finish_checks()
        self._poll_fleet(paused=True)
        while self._fleet.any_is(*states):
            time.sleep(POLL_S)
            self._poll_fleet(paused=True)

    # --- waiting ------------------------------------------------------------------------------------------------------
    def _watch(self, call: Any, on_progress: OnProgress) -> Any:
        """The result of a call to the manager; meanwhile progress is reported and the engines are watched.

        Raises:
            EnginesLostError: when there is no engine left; the client would retry its requests for long.
        """
        self._answered = time.monotonic()
        while not ray.wait([call], timeout=POLL_S)[0]:
            self._report(on_progress)
            self._poll_fleet()
            for fleet in self._fleets():
                fleet.require()
            if self._overlap is not None:
                self._overlap.poll()
        result = self._get(call)
        self._report(on_progress)
        return result

    def _all(self, calls: list[Any], paused: bool = False) -> list[dict[str, float]]:
        """The metrics of every trainer, unless one fails; meanwhile the engines, maybe paused, are watched."""
        waiting = calls
        while waiting:
            done, waiting = ray.wait(waiting, timeout=POLL_S)
            self._get(done)
            self._poll_fleet(paused)
        metrics: list[dict[str, float]] = self._get(calls)
        return metrics

    def _poll_fleet(self, paused: bool = False) -> None:
        if self._fleet is not None:
            self._fleet.poll(paused)
        for fleet in self._frozen:
            fleet.poll()

    def _wait_for_engines(self) -> list[str]:
        """The URLs of the engines that can take weights, one at least."""
        if self._fleet is None:
            return []
        while not (urls := self._fleet.urls()):
            self._fleet.require()
            self._fleet.poll()
            time.sleep(POLL_S)
        return urls

    def _report(self, on_progress: OnProgress) -> None:
        try:
            tally, warnings = self._get(self._manager.progress.remote(), timeout_s=POLL_S)
            on_progress(tally, warnings + [message for fleet in self._fleets() for message in fleet.take_messages()])
            self._answered = time.monotonic()
        except GetTimeoutError:  # the manager's loop is held; its monitor writes down who holds it
            silence_s = time.monotonic() - self._answered
            if silence_s > self._args.stall_timeout_s:
                raise ClusterError(
                    f"the rollout manager has not answered for {silence_s:.0f} s: its event loop is held, most likely "
                    f"by an `async def` hook that does not await. {self._who_stalls()}"
                ) from None

    def _who_stalls(self) -> str:
        log = self._run_dir / "logs" / "rollout.log"
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        named = [line for line in lines if "held the event loop" in line]
        return f"The end of {log}: {named[-1]}" if named else f"See {log}."

    def _get(self, calls: Any, timeout_s: float | None = None) -> Any:
        """ray.get whose errors a user can read."""
        try:
            if isinstance(calls, list):
                _raise_first_error(calls)
            return ray.get(calls, timeout=timeout_s)
        except RayTaskError as error:
            if isinstance(error.cause, SlimeError):
                raise error.cause from None
            raise
        except RayActorError as error:
            raise ClusterError(
                f"a process of the run died: {first_line(error)} Logs are in {self._run_dir / 'logs'} and in Ray's "
                "session directory; --resume goes on from the last checkpoint."
            ) from None


def _raise_first_error(calls: Sequence[Any]) -> None:
    """Wait for all, but not for the others once one has failed."""
    waiting = list(calls)
    while waiting:
        done, waiting = ray.wait(waiting)
        ray.get(done)
