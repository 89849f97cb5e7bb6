"""How many GPUs a SGLang engine takes by its parallel sizes, and how it is spread over machines."""

from __future__ import annotations

from dataclasses import dataclass

from slime_core.engines.process import LOOPBACK
from slime_core.errors import OptionError
from slime_core.options import Options, generates_ahead

TENSOR = ("tp-size", "tensor-parallel-size")
PIPELINE = ("pp-size", "pipeline-parallel-size")
DATA = ("dp-size", "data-parallel-size")
EXPERT = ("ep-size", "expert-parallel-size", "ep")
SIZES = (*TENSOR, *PIPELINE, *DATA, *EXPERT)


@dataclass(frozen=True)
class Node:
    """One machine's part of an engine."""

    host: str = LOOPBACK
    """Where its server listens; that of rank 0 serves."""
    rank: int = 0
    num_nodes: int = 1
    meeting: str = ""
    """HOST:PORT where the nodes find each other."""


@dataclass(frozen=True)
class Sizes:
    """What an engine is cut into. Expert parallelism and attention's data parallelism lie within tensor parallelism."""

    tensor: int
    pipeline: int
    data: int
    """Whole copies."""

    @property
    def num_gpus(self) -> int:
        """One a rank."""
        return self.tensor * self.pipeline * self.data


def sizes(args: Options) -> Sizes:
    """The sizes that `--sglang-tp-size` and its like give; without that one, as --num-gpus-per-engine asks.

    Raises:
        OptionError: when the flags contradict each other.
    """
    pipeline, data, expert = (_size(args, names) for names in (PIPELINE, DATA, EXPERT))
    copies = 1 if "enable-dp-attention" in args.sglang else data
    asked: int | None = args.num_gpus_per_engine
    named = any(name in args.sglang for name in TENSOR)
    tensor = _size(args, TENSOR) if named or asked is None else max(1, asked // (pipeline * copies))
    found = Sizes(tensor, pipeline, copies)
    if asked is not None and found.num_gpus != asked:
        raise OptionError(
            f"--num-gpus-per-engine {asked} does not go with the engines' tensor parallel size {tensor}, pipeline "
            f"parallel size {pipeline} and {copies} data parallel copies, which are {found.num_gpus} GPUs together."
        )
    if tensor % expert or (copies != data and tensor % data):
        what, size = ("ep", expert) if tensor % expert else ("dp", data)
        raise OptionError(f"--sglang-{what}-size {size} does not divide the tensor parallel size {tensor}.")
    if found.num_gpus % args.num_nodes_per_engine:
        raise OptionError(
            f"an engine of {found.num_gpus} GPUs cannot be spread evenly over --num-nodes-per-engine "
            f"{args.num_nodes_per_engine} machines."
        )
    return found


def check_updates(args: Options) -> None:
    """Refuse engines to which SGLang cannot bring weights in the way that is asked for.

    Raises:
        OptionError: naming the flags.
    """
    found = sizes(args)
    if args.weight_transport != "disk" and (found.pipeline > 1 or found.data > 1):
        raise OptionError(
            f"--weight-transport {args.weight_transport} does not go with a --sglang-pp-size or --sglang-dp-size above "
            "1, for which SGLang takes weights from files only; use disk."
        )
    if found.pipeline > 1 and args.pause_mode == "retract" and generates_ahead(args):
        raise OptionError(
            f"--pause-mode retract does not go with --sglang-pp-size {found.pipeline} under this --max-staleness: of "
            "the requests that run, SGLang takes back one pipeline stage's alone; use in_place or abort."
        )


def _size(args: Options, names: tuple[str, ...]) -> int:
    values = next((args.sglang[name] for name in names if name in args.sglang), ["1"])
    if len(values) != 1 or not values[0].isdigit() or int(values[0]) < 1:
        raise OptionError(f"--sglang-{names[0]} must be a whole number of at least 1.")
    return int(values[0])
