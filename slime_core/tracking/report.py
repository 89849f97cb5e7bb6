"""Run directories: `<runs_dir>/<run_name>/` with metrics.jsonl and reward.png; `<runs_dir>/latest` is the newest."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import orjson

from slime_core.errors import DataError, OptionError
from slime_core.tracking import chart

LATEST = "latest"
METRICS_FILE = "metrics.jsonl"
CHART_FILE = "reward.png"


def run_dir(args: argparse.Namespace) -> Path:
    """The directory of the run, which may not exist yet."""
    return Path(args.runs_dir, args.run_name)


def create_run_dir(args: argparse.Namespace) -> Path:
    """Make the run's directory, or under --resume take the one there is, and point `latest` at it.

    Raises:
        OptionError: when a new run would write into an existing directory, or the directory cannot be made.
    """
    directory = run_dir(args)
    try:
        directory.mkdir(parents=True, exist_ok=args.resume is not None)
        _point(directory.parent / LATEST, directory.name)
    except FileExistsError:
        raise OptionError(
            f"the run directory {directory} exists already; pass --resume {args.run_name} to go on with it, "
            "or another --run-name."
        ) from None
    except OSError as error:
        raise OptionError(f"the run directory {directory} cannot be made: {error}; check --runs-dir.") from None
    return directory


def _point(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target`; whoever follows it meanwhile sees the old target or the new one."""
    with tempfile.TemporaryDirectory(dir=link.parent, prefix=".latest-") as directory:
        new = Path(directory) / link.name
        new.symlink_to(target)
        os.replace(new, link)


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, in order; a last line that was cut off in writing is left out.

    Raises:
        DataError: when there is no such file, or a line is not an object.
    """
    path = directory / METRICS_FILE
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; a run with --tracker jsonl writes it.") from None
    whole = [line for line in lines if line.endswith(b"\n")]
    return [_row(path, number, line) for number, line in enumerate(whole, 1)]


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path}, line {number} is not JSON ({error}); delete or mend it.") from None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise DataError(f"{path}, line {number} is not an object with a whole number 'step'; delete or mend it.")
    return row


def truncate_metrics(directory: Path, step: int) -> None:
    """Cut the rows that a run resumed at `step` leaves behind or writes again; without a file there are none.

    These are the rounds from `step` on, and the evaluations after it: the one of `step` itself was made with the very
    weights that the run goes on from.
    """
    path = directory / METRICS_FILE
    if not path.exists():
        return
    kept = [row for row in read_metrics(directory) if row["step"] < step + _is_evaluation(row)]
    temporary = path.with_suffix(".jsonl.new")
    temporary.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in kept))
    os.replace(temporary, path)


def _is_evaluation(row: dict[str, Any]) -> bool:
    return any(name.startswith("eval/") for name in row)


def draw_chart(directory: Path) -> Path | None:
    """Draw reward.png from metrics.jsonl: reward and response length over the rounds; None when no round has a reward.

    Raises:
        DataError: as `read_metrics`.
    """
    if not (directory / METRICS_FILE).exists():
        return None
    curves = chart.collect(read_metrics(directory))
    if not curves.reward:
        return None
    return chart.draw(curves, title=directory.name, path=directory / CHART_FILE)
