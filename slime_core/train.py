"""The training loop: rollout -> train -> send weights, round after round, with evaluation and checkpoints between."""

from __future__ import annotations

from pathlib import Path

from slime_core.bound import Bound, blamed
from slime_core.cluster.cluster import Cluster
from slime_core.options import OPTIONS_FILE, Options, write_options
from slime_core.plugins import load_plugins
from slime_core.rollout.tally import Tally
from slime_core.tracking.checkpoints import latest_checkpoint, new_checkpoint
from slime_core.tracking.metrics import perf_metrics
from slime_core.tracking.progress import Progress
from slime_core.tracking.report import create_run_dir, draw_chart, truncate_metrics


def train(args: Options) -> Path:
    """Run or resume a training run; returns its directory.

    Raises:
        SlimeError: when something a user can act on goes wrong; every process of the run is gone by then.
    """
    run_dir = create_run_dir(args)
    write_options(args, run_dir / OPTIONS_FILE)
    plugins = load_plugins(args, args.tracker)
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
        self._args, self._run_dir, self._cluster = args, run_dir, cluster
        self._progress, self._trackers = progress, trackers

    def loop(self) -> None:
        """Every round from the first, or from where the checkpoint ended, to the last."""
        args = self._args
        first = self._resume() if args.resume is not None else 0
        self._cluster.send_weights(first)
        if args.resume is None:
            self._evaluate(0)
        for step in range(first, args.num_rollout):
            self._round(step)
            done, last = step + 1, step + 1 == args.num_rollout
            if not args.no_save and (last or (args.save_interval and done % args.save_interval == 0)):
                self._save(done)
            if last or (args.eval_interval and done % args.eval_interval == 0):
                self._evaluate(done)

    def _round(self, step: int) -> None:
        phase, cluster = self._progress.phase, self._cluster
        self._progress.lap()
        with phase("rollout", total=self._args.rollout_batch_size, step=step):
            collected = cluster.rollout(step, self._show)
        with phase("train", step=step):
            trained = cluster.train(step, collected)
        with phase("weights", step=step):
            metrics = collected.metrics | trained | cluster.send_weights(step + 1)
        tokens = {"rollout_tokens": collected.num_tokens, "train_tokens": trained["train/num_tokens"]}
        self._log(step, metrics | perf_metrics(self._progress.lap(), **tokens))

    def _evaluate(self, step: int) -> None:
        if self._args.eval_data:
            with self._progress.phase("evaluation"):
                self._log(step, self._cluster.evaluate(self._show))

    def _resume(self) -> int:
        checkpoint, step = latest_checkpoint(self._run_dir)
        self._cluster.load(checkpoint)
        truncate_metrics(self._run_dir, step)
        return step

    def _save(self, step: int) -> None:
        with new_checkpoint(self._run_dir, step, self._args.keep_checkpoints) as directory:
            self._cluster.save(directory)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        for tracker in self._trackers:
            with blamed(tracker):
                tracker(args=self._args, step=step, metrics=metrics)

    def _show(self, tally: Tally, warnings: list[str]) -> None:
        """Called a few times a second while the rollout manager works."""
        reward = {"reward": tally.reward_sum / tally.num_rewards} if tally.num_rewards else {}
        self._progress.update(tally.num_kept, samples=float(tally.num_samples), **reward)
        for warning in warnings:
            self._progress.note(f"warning: {warning}")
