"""Which bundle of the Ray placement group every engine and trainer gets."""

from __future__ import annotations

import os
from dataclasses import dataclass

from slime_core.errors import ClusterError
from slime_core.options import Options


@dataclass(frozen=True)
class Seat:
    """A place for one actor: a bundle, and how much of it the actor takes."""

    bundle: int
    num_cpus: float
    num_gpus: float


@dataclass(frozen=True)
class Layout:
    """The bundles a run asks Ray for, and who sits where."""

    bundles: list[dict[str, float]]
    engines: list[Seat]
    trainers: list[Seat]


def plan(args: Options, use_gpus: bool) -> Layout:
    """Colocated engines and trainers share bundles, disaggregated ones have their own.

    An embedded engine computes on the CPU; trainers take a GPU each where `use_gpus`.
    """
    shared = args.placement == "colocated"
    first_engine = 0 if shared else args.num_trainers
    num_bundles = max(args.num_trainers, first_engine + args.num_engines)
    share = 0.5 if shared else 1.0
    bundles: list[dict[str, float]] = [{"CPU": 1.0} for _ in range(num_bundles)]
    for rank in range(args.num_trainers if use_gpus else 0):
        bundles[rank]["GPU"] = 1.0
    engines = [Seat(first_engine + i, share, 0.0) for i in range(args.num_engines)]
    trainers = [Seat(rank, share, 1.0 if use_gpus else 0.0) for rank in range(args.num_trainers)]
    return Layout(bundles, engines, trainers)


def choose_device(args: Options, num_gpus: float) -> str:
    """`cuda` or `cpu` for the trainers.

    Raises:
        ClusterError: when GPUs are asked for that the cluster does not have.
    """
    if args.device == "cuda" and num_gpus < args.num_trainers:
        raise ClusterError(
            f"--device cuda with --num-trainers {args.num_trainers} needs as many GPUs; Ray has {num_gpus:g}."
        )
    enough = num_gpus >= max(1, args.num_trainers)
    return "cuda" if args.device == "cuda" or (args.device == "auto" and enough) else "cpu"


def threads_each(asked: int | None, sharers: int) -> int:
    """CPU threads of one process: what the flag says, or an equal share of this machine's cores."""
    return asked or max(1, num_cores() // max(1, sharers))


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
