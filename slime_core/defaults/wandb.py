"""`--tracker wandb`: Weights & Biases, offline unless WANDB_API_KEY is set; `wandb sync` uploads later."""

from __future__ import annotations

import argparse
import os
import secrets
from importlib import import_module
from pathlib import Path
from typing import Any

from slime_core import PluginError, hookimpl
from slime_core.tracking.report import run_dir

ID_FILE = "wandb_id"
"""In the run directory: a resumed run goes on under the same id."""


class Wandb:
    """One wandb run, written below the run directory. The key is read by wandb from the environment alone."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._wandb = wandb = _import_wandb()
        directory = run_dir(args)
        directory.mkdir(parents=True, exist_ok=True)
        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self._run = wandb.init(
            project=args.wandb_project,
            group=args.wandb_group,
            name=args.run_name,
            id=_run_id(directory),
            dir=str(directory),
            config={name: _plain(value) for name, value in vars(args).items()},
            mode=mode,
            # an offline run cannot ask the server; `wandb sync` puts it under the same id
            resume="allow" if mode == "online" else None,
            reinit="create_new",
            # x_disable_meta: the command line, which wandb would send, may have secrets
            settings=wandb.Settings(
                silent=True, console="off", disable_code=True, disable_git=True, x_disable_meta=True
            ),
        )
        # a metric of its own, because wandb's built-in step refuses rows of an earlier step after a resume
        self._run.define_metric("*", step_metric="step")

    @staticmethod
    @hookimpl
    def add_options(parser: argparse._ArgumentGroup) -> None:
        """The tracker's flags."""
        parser.add_argument("--wandb-project", default="slime", metavar="NAME", help="where the run is listed")
        parser.add_argument("--wandb-group", metavar="NAME", help="runs of one group are shown together")

    @hookimpl
    def log_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Log one row under the metric `step`."""
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """End the run, and wait for wandb's own process, which writes the last of the file after `finish` returns."""
        self._run.finish()
        self._wandb.teardown()


def _import_wandb() -> Any:
    try:
        return import_module("wandb")
    except ImportError as error:
        raise PluginError(
            f"--tracker wandb needs the wandb package ({error}): pip install 'slime-core[wandb]'"
        ) from None


def _run_id(directory: Path) -> str:
    """The id kept in the run directory, made on first use: a run deleted on the server never gets its id back."""
    path = directory / ID_FILE
    if not path.is_file():
        path.write_text(secrets.token_hex(8))
    return path.read_text().strip()


def _plain(value: Any) -> Any:
    """An option's value as wandb shows it."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, dict | str | int | float | bool | None) else str(value)
