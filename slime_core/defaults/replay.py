"""`--rollout replay`: train on the samples that an earlier run wrote under --save-samples, without generating any."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from slime_core import DataError, Group, OptionError, hookimpl
from slime_core.rollout.sample_file import read_groups


@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """The plugin's flags."""
    parser.add_argument("--replay-samples", metavar="DIR", help="the directory `samples` of an earlier run")
    parser.add_argument(
        "--replay-fraction", type=float, default=1.0, metavar="X", help="train this part of each round's groups"
    )


@hookimpl
def configure(args: argparse.Namespace) -> None:
    """Refuse a missing directory.

    Raises:
        OptionError: naming the flag.
    """
    if args.replay_samples is None or not Path(args.replay_samples).is_dir():
        raise OptionError("--rollout replay needs --replay-samples DIR, the directory `samples` of an earlier run.")
    if not 0 < args.replay_fraction <= 1:
        raise OptionError(f"--replay-fraction {args.replay_fraction} must be above 0 and at most 1.")


@hookimpl
async def rollout(args: Any, step: int, source: Any) -> list[Group]:
    """The groups of round `step` as they were trained then, or a random part of them, the same in every run."""
    path = Path(args.replay_samples) / f"step_{step:06d}.parquet"
    if not path.is_file():
        raise DataError(f"there are no samples of round {step} to replay: {path} is missing; lower --num-rollout.")
    groups = read_groups(path)
    count = max(1, round(args.replay_fraction * len(groups)))
    chosen = sorted(np.random.default_rng([args.seed, step]).permutation(len(groups))[:count])
    return source.adopt([groups[position] for position in chosen])
