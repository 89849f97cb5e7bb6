"""Checkpoints of a run: complete directories or none, the newest ones kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from slime_core.errors import CheckpointError
from slime_core.tracking.report import truncate_metrics

PREFIX = "step_"


def begin_checkpoint(run_dir: Path, step: int) -> Path:
    """An empty directory to write the state after `step` rounds to; `complete_checkpoint` gives it its name."""
    root = run_dir / "checkpoints"
    for abandoned in root.glob(f".{PREFIX}*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    unfinished = root / f".{PREFIX}{step:06d}"
    unfinished.mkdir(parents=True)
    return unfinished


def final_path(unfinished: Path) -> Path:
    """Where a directory of `begin_checkpoint` will be once it is complete."""
    return unfinished.with_name(unfinished.name.removeprefix("."))


def complete_checkpoint(run_dir: Path, unfinished: Path, keep: int) -> None:
    """Give a directory in which everything is written its name, and let the link `latest` point to it.

    Args:
        run_dir: of the run.
        unfinished: what `begin_checkpoint` gave.
        keep: how many checkpoints stay, this one included.
    """
    final = final_path(unfinished)
    shutil.rmtree(final, ignore_errors=True)
    unfinished.rename(final)
    link = final.parent / "latest.new"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    link.replace(final.parent / "latest")
    for old in checkpoints(run_dir)[:-keep]:
        shutil.rmtree(old)


def checkpoints(run_dir: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    return sorted((run_dir / "checkpoints").glob(f"{PREFIX}*"))


def latest_checkpoint(run_dir: Path) -> tuple[Path, int]:
    """The newest complete checkpoint, and the number of rounds trained in it.

    Raises:
        CheckpointError: when the run has none.
    """
    found = checkpoints(run_dir)
    if not found:
        raise CheckpointError(f"{run_dir} has no checkpoint to resume from; start without --resume.")
    return found[-1], int(found[-1].name.removeprefix(PREFIX))


def resume(run_dir: Path, load: Callable[[Path], None]) -> int:
    """Load the newest checkpoint, and cut the metrics that lie behind it; returns the rounds trained in it.

    A run that was killed before its first checkpoint has trained none: it starts over.
    """
    if not checkpoints(run_dir):
        truncate_metrics(run_dir, -1)
        return 0
    directory, step = latest_checkpoint(run_dir)
    load(directory)
    truncate_metrics(run_dir, step)
    return step
