"""`--tracker jsonl`: every call a line of `<run directory>/metrics.jsonl`, `step` first."""

from __future__ import annotations

import argparse
from typing import Any

import orjson

from slime_core import hookimpl
from slime_core.tracking.report import METRICS_FILE, run_dir


class Jsonl:
    """Opens the file anew for every line: there is one a round, and nothing is lost when the run is killed."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._path = run_dir(args) / METRICS_FILE

    @hookimpl
    def log_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Append one object; a number that is not finite becomes null."""
        line = orjson.dumps({"step": step, **metrics}, default=float, option=orjson.OPT_SERIALIZE_NUMPY)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(line + b"\n")
