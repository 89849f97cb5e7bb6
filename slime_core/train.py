"""The training loop: rollout -> train -> send weights, round after round, with evaluation and checkpoints between."""

from __future__ import annotations

from pathlib import Path

from slime_core.bound import Bound, blamed
from slime_core.cluster.cluster import Cluster
from slime_core.engine_work import EngineWork
from slime_core.errors import EnginesLostError
from slime_core.options import OPTIONS_FILE, Options, without_secrets, write_options
from slime_core.plugins import load_plugins
from slime_core.saving import Saving
from slime_core.schedule import Schedule, with_num_rollout
from slime_core.tracking.alarms import Alarms
from slime_core.tracking.checkpoints import resume
from slime_core.tracking.metrics import perf_metrics
from slime_core.tracking.progress import Progress
from slime_core.tracking.report import METRICS_FILE, create_run_dir, draw_chart, read_metrics
from slime_core.training.megatron.config import check_backend


def train(args: Options) -> Path:
    """Run or resume a training run; returns its directory.

    Raises:
        SlimeError: when something a user can act on goes wrong; every process of the run is gone by then.
    """
    check_backend(args)
    args = with_num_rollout(args)
    run_dir = create_run_dir(args)
    write_options(args, run_dir / OPTIONS_FILE)
    plugins = load_plugins(without_secrets(args), args.tracker)
    trackers = [plugins.bind("log_metrics", name) for name in args.tracker]
    try:
        with Progress(args) as progress:
            with progress.phase("starting Ray, engines and trainers"):
                cluster = Cluster(args, run_dir)
            with cluster:
                Run(args, run_dir, cluster, progress, trackers).loop()
    finally:
        plugins.close()
        draw_chart(run_dir)
    return run_dir


class Run:
    """One run's loop, with what it needs at every step."""

    def __init__(self, args: Options, run_dir: Path, cluster: Cluster, progress: Progress, trackers: list[Bound]):
        self._args, self._run_dir, self._cluster, self._progress = args, run_dir, cluster, progress
        self._shown_args = without_secrets(args)
        self._trackers, self._schedule, self._alarms = trackers, Schedule(args), Alarms(args, progress.note)
        self._engines, self._saving = EngineWork(cluster, progress, self._log), Saving(args, run_dir, cluster)
        self._num_trained = 0

    def loop(self) -> None:
        """Every round from the first, or from where the checkpoint ended, to the last."""
        args, schedule = self._args, self._schedule
        first = resume(self._run_dir, self._cluster.load) if args.resume is not None else 0
        self._engines.send_weights(first)
        if first == 0 and args.eval_data:
            self._engines.evaluate(first)
        self._num_trained = first
        if first and (self._run_dir / METRICS_FILE).exists():
            self._alarms.recall(read_metrics(self._run_dir))
        try:
            for step in range(first, args.num_rollout):
                # the weights a run resumes from were evaluated before they were saved
                self._round(step, evaluate=step > first and schedule.evaluate_beside(step))
                done = step + 1
                if schedule.evaluate_alone(done):
                    self._engines.evaluate(done)
                if schedule.export(done):  # before the checkpoint: a run resumed from that one would not write it
                    with self._progress.phase("save"):
                        self._saving.export(done)
                if schedule.save(done):
                    self._engines.settle()
                    with self._progress.phase("save"):
                        self._saving.begin(done)
            self._saving.finish()
        except EnginesLostError as error:
            self._cluster.abandon()
            directory = self._saving.begin(self._num_trained)
            self._saving.finish()
            saved = f"The state after {self._num_trained} rounds is saved in {directory}; --resume goes on from it."
            raise EnginesLostError(f"{error}\n{saved}") from None

    def _round(self, step: int, evaluate: bool) -> None:
        phase, engines, schedule = self._progress.phase, self._engines, self._schedule
        before = self._progress.lap()
        with phase("rollout", total=self._args.rollout_batch_size, step=step):
            collected = engines.take_round(step)
        metrics = collected.metrics | {"perf/save_s": before.get("save", 0.0)}
        if schedule.ahead:
            metrics |= engines.send_weights(step)
            if step + 1 < self._args.num_rollout:
                engines.start_round(step + 1)
        if evaluate:
            engines.start_evaluation(step)
        with phase("train", step=step):
            metrics |= self._cluster.train(step, collected)
        self._num_trained = step + 1
        try:
            if not schedule.ahead:
                metrics |= engines.send_weights(step + 1)
        finally:  # the round is trained, and may be saved, whatever becomes of the engines
            metrics |= self._cluster.engine_metrics()
            tokens = metrics.get("train/num_tokens", 0)
            trainers = self._args.num_trainers
            self._log(step, metrics | perf_metrics(self._progress.lap(), train_tokens=tokens, num_trainers=trainers))
        self._alarms.check(step, metrics)
        self._saving.look()

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        for tracker in self._trackers:
            with blamed(tracker):
                tracker(args=self._shown_args, step=step, metrics=metrics)
