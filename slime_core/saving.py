"""The checkpoints of a run as they come about: begun, maybe written beside the rounds that follow, then complete."""

from __future__ import annotations

import shutil
from pathlib import Path

from slime_core.cluster.cluster import Cluster
from slime_core.options import Options
from slime_core.tracking.checkpoints import PREFIX, begin_checkpoint, complete_checkpoint, final_path

MODEL = "model"
"""In a checkpoint: the model as transformers reads it."""

EXPORTS = "hf"
"""In the run directory: the models of `--save-hf`."""


class Saving:
    """At most one checkpoint is under way; it counts when every process has written its part."""

    def __init__(self, args: Options, run_dir: Path, cluster: Cluster) -> None:
        self._args, self._run_dir, self._cluster = args, run_dir, cluster
        self._unfinished: Path | None = None

    def begin(self, step: int) -> Path:
        """Write the state after `step` rounds, or begin to under `--async-save`; where it will be."""
        self.finish()
        unfinished = begin_checkpoint(self._run_dir, step)
        self._cluster.save(unfinished, step)
        if self._args.save_hf is None:
            self._cluster.export(unfinished / MODEL)
        self._unfinished = unfinished
        if not self._args.async_save:
            self.finish()
        return final_path(unfinished)

    def look(self) -> None:
        """Complete the checkpoint under way if it is written by now."""
        if self._unfinished is not None and self._cluster.saved(wait=False):
            self._complete(self._unfinished)

    def finish(self) -> None:
        """Wait for the checkpoint under way and complete it."""
        if self._unfinished is not None:
            self._cluster.saved(wait=True)
            self._complete(self._unfinished)

    def export(self, step: int) -> None:
        """Write the model after `step` rounds to `hf/`."""
        final = self._run_dir / EXPORTS / f"{PREFIX}{step:06d}"
        unfinished = final.with_name(f".{final.name}")
        for directory in (unfinished, final):
            shutil.rmtree(directory, ignore_errors=True)
        self._cluster.export(unfinished)
        unfinished.rename(final)

    def _complete(self, unfinished: Path) -> None:
        self._unfinished = None
        complete_checkpoint(self._run_dir, unfinished, self._args.keep_checkpoints)
