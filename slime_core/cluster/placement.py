"""Which bundle of the Ray placement group every engine and trainer gets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from slime_core.engines.frozen import options_of
from slime_core.engines.parallel import check_updates, sizes
from slime_core.errors import ClusterError
from slime_core.options import Options

LENT_GPU = 0.5
"""What of a rank's GPU Ray counts as the engine's."""


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
    followers: list[list[Seat]]
    """For every engine its parts on further machines."""
    lenders: list[list[int]]
    """For every engine the ranks whose GPUs it uses; none where it has its own, or computes on the CPU."""


def plan(args: Options, use_gpus: bool) -> Layout:
    """Colocated engines and trainers share bundles, disaggregated ones have their own.

    Where `use_gpus`, trainers take a GPU each and SGLang engines as many as their parallel sizes say, in as many parts
    as they have machines; an embedded engine computes on the CPU, an external one elsewhere. With --offload-engines an
    engine uses the GPUs of as many trainers.

    Raises:
        OptionError: when an engine's parallel sizes contradict each other, or it could take no weights.
        ClusterError: when SGLang engines would share GPUs with trainers at the same time, or there are too few, or
            they would not see the memory that weights are sent in.
    """
    shared = args.placement == "colocated"
    num_engines = len(args.external_engines) or args.num_engines
    starts_sglang = args.engine == "sglang" and not args.external_engines
    if starts_sglang:
        check_updates(args)
    num_gpus = sizes(args).num_gpus if starts_sglang else 0
    num_nodes = args.num_nodes_per_engine
    engine_gpus = num_gpus // num_nodes if use_gpus else 0
    lent = bool(engine_gpus and shared and args.num_trainers and num_engines)
    if lent and not args.offload_engines:
        raise ClusterError(
            "SGLang engines and trainers can share GPUs only if the engines free their memory meanwhile: add "
            "--offload-engines, or give them GPUs of their own with --placement disaggregated."
        )
    if use_gpus and args.weight_transport == "tensor" and not lent and num_engines:
        raise ClusterError(
            "--weight-transport tensor passes handles of the trainers' GPU memory, which engines on GPUs of their own "
            "do not see; use broadcast or disk, or --placement colocated --offload-engines."
        )
    if lent and num_engines * engine_gpus > args.num_trainers:
        raise ClusterError(
            f"{num_engines} engines of {engine_gpus} GPUs cannot share those of --num-trainers {args.num_trainers}, "
            "one each; ask for fewer engines, or smaller ones."
        )
    first_engine = 0 if shared else args.num_trainers
    num_parts = num_engines * num_nodes
    num_bundles = max(args.num_trainers, first_engine + num_parts)
    share = 0.5 if shared else 1.0
    bundles: list[dict[str, float]] = [{"CPU": 1.0} for _ in range(num_bundles)]
    for rank in range(args.num_trainers if use_gpus else 0):
        bundles[rank]["GPU"] = 1.0
    for index in range(num_parts if engine_gpus and not lent else 0):
        bundles[first_engine + index]["GPU"] = float(engine_gpus)
    parts = [Seat(first_engine + i, share, float(engine_gpus)) for i in range(num_parts)]
    followers = [parts[i * num_nodes + 1 : (i + 1) * num_nodes] for i in range(num_engines)]
    if lent:  # Ray gives fractions of one GPU only: an engine sits with the first rank and is told of the others'
        engines = [Seat(i * engine_gpus, share, LENT_GPU) for i in range(num_engines)]
        lenders = [list(range(i * engine_gpus, (i + 1) * engine_gpus)) for i in range(num_engines)]
    else:
        engines = parts[::num_nodes]
        lenders = [[] for _ in range(num_engines)]
    trainer_gpus = (1 - LENT_GPU if lent else 1.0) if use_gpus else 0.0
    trainers = [Seat(rank, share, trainer_gpus) for rank in range(args.num_trainers)]
    frozen: dict[str, list[Seat]] = {}
    for model in args.frozen_model:
        own = options_of(args, model)
        gpus = float(sizes(own).num_gpus if use_gpus and args.engine == "sglang" else 0)
        frozen[model.name] = [Seat(len(bundles) + i, 1.0, gpus) for i in range(model.num_engines)]
        bundles += [{"CPU": 1.0} | ({"GPU": gpus} if gpus else {}) for _ in range(model.num_engines)]
    return Layout(bundles, engines, trainers, frozen, followers, lenders)


def lent_gpus(
    lenders: Sequence[Sequence[int]], places: Sequence[tuple[str, list[str]]], transport: str
) -> list[list[str]]:
    """The GPUs that an engine sees: those that trainers lend it and, last, one whose memory it only reads weights from.

    Args:
        places: of every rank the machine, and which of its GPUs it has.
        transport: `tensor` passes handles of the first rank's memory.

    Raises:
        ClusterError: when an engine's would be on several machines, or weights in the memory of another.
    """
    machine, own = places[0]
    for ranks in lenders:
        if len({places[rank][0] for rank in ranks}) > 1:
            raise ClusterError(
                f"trainers {ranks[0]} to {ranks[-1]} are on several machines, and an engine of {len(ranks)} GPUs "
                "cannot share theirs; choose --num-gpus-per-engine so that it fits a machine."
            )
        if transport == "tensor" and places[ranks[0]][0] != machine:
            raise ClusterError(
                f"the engine on the GPUs of trainer {ranks[0]} cannot open the memory of trainer 0, which is on "
                "another machine; use --weight-transport disk with a --weights-dir that both see."
            )
    lent = [[gpu for rank in ranks for gpu in places[rank][1]] for ranks in lenders]
    seen = own[:1] if transport == "tensor" else []
    return [gpus + [gpu for gpu in seen if gpu not in gpus] for gpus in lent]


def data_parallel_ranks(args: Options) -> list[int]:
    """Whose share of a round each trainer rank gets: ranks with parts of one copy of the model train on the same.

    Megatron numbers its ranks by tensor, context, data and pipeline parallelism, the first fastest.
    """
    together = args.tensor_model_parallel_size * args.context_parallel_size
    num_copies = args.num_trainers // (together * args.pipeline_model_parallel_size)
    return [rank // together % num_copies for rank in range(args.num_trainers)]


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
