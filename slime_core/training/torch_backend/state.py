"""What of a trainer is in a checkpoint, by name: weights, optimisers, a renewed reference, random states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from slime_core.errors import CheckpointError
from slime_core.training.ranks import Ranks
from slime_core.training.torch_backend.checkpoint import Tensors, load, saved_shapes
from slime_core.training.torch_backend.optimizer import Optimizer


def tensors_of(optimizers: Mapping[str, Optimizer], reference: Tensors, rank: int) -> Tensors:
    """The tensors, not copies, of this rank.

    Args:
        optimizers: by whose weights they update, such as `policy`.
        reference: the weights of a renewed one, by name.
        rank: of this process.
    """
    tensors = {f"reference/weights/{name}": tensor for name, tensor in reference.items()}
    for who, optimizer in optimizers.items():
        tensors |= {f"{who}/weights/{name}": tensor for name, tensor in optimizer.weights().items()}
        tensors |= {f"{who}/optimizer/{name}": tensor for name, tensor in optimizer.state().items()}
        tensors[f"{who}/steps"] = torch.tensor(optimizer.steps)
    tensors[_rng(rank)] = torch.get_rng_state()
    return tensors


def restore(optimizers: Mapping[str, Optimizer], reference: Tensors, ranks: Ranks, directory: Path) -> None:
    """Go on from a checkpoint that any number of ranks wrote; each rank must call it.

    What the checkpoint does not have stays as it is where it may: a reference that was never renewed, the random state
    of a rank that there was not.

    Raises:
        CheckpointError: when there is no such checkpoint, or it does not fit.
    """
    saved = saved_shapes(directory)
    for who, optimizer in optimizers.items():
        if any(name.startswith(f"{who}/optimizer/") for name in saved):
            optimizer.prime()
    wanted = tensors_of(optimizers, reference, ranks.rank)
    if not any(name.startswith("reference/") for name in saved):
        wanted = {name: tensor for name, tensor in wanted.items() if not name.startswith("reference/")}
    rng = wanted[_rng(ranks.rank)]
    if _rng(ranks.rank) not in saved:
        del wanted[_rng(ranks.rank)]
    for who in optimizers:
        stray = [name for name in saved if name.startswith(f"{who}/weights/") and name not in wanted]
        if stray:
            raise CheckpointError(
                f"the training state in {directory} has {stray[0]}, which these options do not train; resume with the "
                "options of the run, --model, --freeze-params, --only-train-params and --lora-* among them."
            )
    load(wanted, directory, ranks)
    for who, optimizer in optimizers.items():
        optimizer.loaded(int(wanted[f"{who}/steps"].item()))
    torch.set_rng_state(rng)


def _rng(rank: int) -> str:
    return f"rng/{rank}"
