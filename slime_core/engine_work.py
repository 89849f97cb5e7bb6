"""What the engines do during a run: collect a round, maybe one ahead, evaluate, take new weights; never all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime_core.cluster.actors import RoundRefs
from slime_core.cluster.cluster import Cluster
from slime_core.rollout.tally import Tally
from slime_core.tracking.progress import Progress

LogEvaluation = Callable[[int, dict[str, float]], None]


class EngineWork:
    """Keeps weights from changing under a round or an evaluation, and shows progress while the run waits for one."""

    def __init__(self, cluster: Cluster, progress: Progress, log_evaluation: LogEvaluation) -> None:
        self._cluster, self._progress, self._log_evaluation = cluster, progress, log_evaluation
        self._version = -1
        self._rounds: dict[int, Any] = {}
        self._evaluation: tuple[int, Any] | None = None

    def start_round(self, step: int) -> None:
        """Begin to collect the round of `step` under the weights that the engines have."""
        self._rounds[step] = self._cluster.start_rollout(step, self._version)

    def take_round(self, step: int) -> RoundRefs:
        """The round of `step`, started now if it was not before."""
        if step not in self._rounds:
            self.start_round(step)
        collected: RoundRefs = self._cluster.wait(self._rounds[step], self._show)
        del self._rounds[step]
        return collected

    def end_round(self) -> None:
        """Return when no round is being collected; one that was collected ahead stays for its turn."""
        for started in self._rounds.values():
            with self._progress.phase("rollout"):
                self._cluster.wait(started, self._show)

    def start_evaluation(self, step: int) -> None:
        """Begin to evaluate the engines' weights, those after `step` rounds."""
        self._evaluation = step, self._cluster.start_evaluation(step)

    def evaluate(self, step: int) -> None:
        """Evaluate the trainer's weights, those after `step` rounds, while nothing else goes on."""
        self.send_weights(step)
        self.end_round()
        self.start_evaluation(step)
        self.end_evaluation()

    def end_evaluation(self) -> None:
        """Return when no evaluation is under way, its metrics logged."""
        if self._evaluation is not None:
            step, started = self._evaluation
            with self._progress.phase("evaluation"):
                metrics = self._cluster.wait(started, self._show)
            self._evaluation = None
            self._log_evaluation(step, metrics)

    def send_weights(self, version: int) -> dict[str, float]:
        """Give the engines the trainer's weights, unless they have them already; returns the metrics of it."""
        self.end_evaluation()
        if version == self._version:
            return {}
        self.settle()
        with self._progress.phase("weights"):
            self._version = version
            return self._cluster.send_weights(version)

    def settle(self) -> None:
        """Return when nothing is under way, aborted requests included."""
        self.end_evaluation()
        self.end_round()
        self._cluster.wait(self._cluster.start_freeing(), self._show)

    def _show(self, tally: Tally, warnings: list[str]) -> None:
        """Called a few times a second while the rollout manager works."""
        reward = {"reward": tally.reward_sum / tally.num_rewards} if tally.num_rewards else {}
        self._progress.update(tally.num_kept, samples=float(tally.num_samples), **reward)
        for warning in warnings:
            self._progress.note(f"warning: {warning}")
