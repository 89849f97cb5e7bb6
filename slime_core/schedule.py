"""When a run evaluates, saves and generates ahead: decided from the options alone."""

from __future__ import annotations

from dataclasses import dataclass

from slime_core.options import Options, generates_ahead
from slime_core.rollout.rows import count_prompts


@dataclass(frozen=True)
class Schedule:
    """`done` counts trained rounds."""

    args: Options

    @property
    def ahead(self) -> bool:
        """Whether a round is generated while the one before it trains."""
        return generates_ahead(self.args)

    def save(self, done: int) -> bool:
        """Whether a checkpoint is written now."""
        interval, last = self.args.save_interval, done == self.args.num_rollout
        return not self.args.no_save and (last or bool(interval and done % interval == 0))

    def export(self, done: int) -> bool:
        """Whether the model is written to stay, as transformers reads it."""
        interval, last = self.args.save_hf, done == self.args.num_rollout
        return bool(interval) and (last or done % interval == 0)

    def evaluate_alone(self, done: int) -> bool:
        """Whether to evaluate now, with everything else waiting: at the end, and before a checkpoint is written."""
        return self._evaluate(done) and not self._beside(done)

    def evaluate_beside(self, done: int) -> bool:
        """Whether to evaluate these weights while the next round trains."""
        return self._evaluate(done) and self._beside(done)

    def _evaluate(self, done: int) -> bool:
        interval, last = self.args.eval_interval, done == self.args.num_rollout
        return bool(self.args.eval_data) and done > 0 and (last or bool(interval and done % interval == 0))

    def _beside(self, done: int) -> bool:
        """Where engines and trainers do not share devices, or work at the same time anyway."""
        apart = self.ahead or self.args.placement == "disaggregated"
        return apart and done < self.args.num_rollout and not self.save(done)


def with_num_rollout(args: Options) -> Options:
    """The options with the rounds that --num-epoch passes over the data make; the same options without it."""
    if args.num_epoch is None:
        return args
    rows = count_prompts(args)
    rounds = max(1, args.num_epoch * rows // args.rollout_batch_size)
    return Options(**{**vars(args), "num_rollout": rounds, "num_epoch": None})
