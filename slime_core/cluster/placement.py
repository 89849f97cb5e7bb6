"""Which bundle of the Ray placement group every engine and trainer gets."""

from __future__ import annotations

import os
from dataclasses import dataclass

from slime_core.engines.frozen import options_of
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
    frozen: dict[str, list[Seat]]
    """Frozen model -> its engines, which share with nobody."""


def plan(args: Options, use_gpus: bool) -> Layout:
    """Colocated engines and trainers share bundles, disaggregated ones have their own.

    Where `use_gpus`, trainers take a GPU each and SGLang engines --num-gpus-per-engine; an embedded engine computes on
    the CPU, an external one elsewhere.

    Raises:
        ClusterError: when SGLang engines would share GPUs with trainers.
    """
    shared = args.placement == "colocated"
    num_engines = len(args.external_engines) or args.num_engines
    engine_gpus = args.num_gpus_per_engine if use_gpus and args.engine == "sglang" and not args.external_engines else 0
    if engine_gpus and shared and args.num_trainers and num_engines:
        raise ClusterError(
            "SGLang engines cannot share GPUs with trainers yet; give them their own with --placement disaggregated."
        )
    first_engine = 0 if shared else args.num_trainers
    num_bundles = max(args.num_trainers, first_engine + num_engines)
    share = 0.5 if shared else 1.0
    bundles: list[dict[str, float]] = [{"CPU": 1.0} for _ in range(num_bundles)]
    for rank in range(args.num_trainers if use_gpus else 0):
        bundles[rank]["GPU"] = 1.0
    for index in range(num_engines if engine_gpus else 0):
        bundles[first_engine + index]["GPU"] = float(engine_gpus)
    engines = [Seat(first_engine + i, share, float(engine_gpus)) for i in range(num_engines)]
    trainers = [Seat(rank, share, 1.0 if use_gpus else 0.0) for rank in range(args.num_trainers)]
    frozen: dict[str, list[Seat]] = {}
    for model in args.frozen_model:
        own = options_of(args, model)
        gpus = float(own.num_gpus_per_engine if use_gpus and args.engine == "sglang" else 0)
        frozen[model.name] = [Seat(len(bundles) + i, 1.0, gpus) for i in range(model.num_engines)]
        bundles += [{"CPU": 1.0} | ({"GPU": gpus} if gpus else {}) for _ in range(model.num_engines)]
    return Layout(bundles, engines, trainers, frozen)


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
