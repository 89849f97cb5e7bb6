"""FSDP2: parameters, gradients and optimiser state cut up among the ranks; a layer is whole only while it computes.

Rajbhandari et al., "ZeRO" (arXiv 1910.02054), stage 3, by torch's `fully_shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from slime_core.training.ranks import Ranks

T = TypeVar("T")


class Entry(nn.Module):
    """A model and the door to it: whatever computes with its parameters runs as this module's forward.

    FSDP2 gathers parameters around a module's forward; here it is often a part of the model alone that computes.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[..., Any], *inputs: Any) -> Any:
        """compute(*inputs)."""
        return compute(*inputs)


def shard(
    root: nn.Module, layers: Sequence[nn.Module], ranks: Ranks, *, dtype: torch.dtype, offload: bool = False
) -> None:
    """Cut up the root's parameters, layer by layer, over all ranks; gradients are summed in float32.

    Args:
        root: on the CPU or its device, the same on every rank; only what runs as its forward may use the parameters.
        layers: modules of it that are gathered one by one; the rest is gathered at once.
        ranks: at least one, in a process group.
        dtype: of the computation; the parts kept, and updated, have the dtype that the parameters have now.
        offload: keep them on the CPU, where the optimiser works too.
    """
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    offloading: OffloadPolicy = CPUOffloadPolicy() if offload else OffloadPolicy()
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*layers, root):
        part: Any = fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offloading)
        part.set_gradient_divide_factor(1.0)
        # a sum in plain words, which gloo knows too
        part.set_force_sum_reduction_for_comms(True)
    entry: Any = root
    # experts that one rank needs and another does not
    entry.set_reduce_scatter_unused_params(True)


def run(root: nn.Module, *inputs: Any) -> Any:
    """The root's forward; without a gradient its parameters are let go at once, for no backward pass would do it."""
    output = root(*inputs)
    if isinstance(root, FSDPModule) and not torch.is_grad_enabled():
        root.reshard()
    return output


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks, in order; an outer one hides those within it."""
    found: list[nn.Module] = []
    hidden: set[int] = set()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and id(module) not in hidden:
            found.append(module)
            hidden.update(map(id, module.modules()))
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of one that is cut up, gathered by all ranks on their device; any other as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    here: DTensor = tensor.to(tensor.device_mesh.device_type)
    return here.full_tensor()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, all of it where it is not cut up."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def in_step(parts: Sequence[T], ranks: Ranks, *, sharded: bool) -> Iterator[T | None]:
    """The parts, then None until every rank has had as many: each gathers a sharded model for all ranks."""
    most = ranks.most(len(parts)) if sharded else len(parts)
    yield from (*parts, *[None] * (most - len(parts)))


def assign(target: torch.Tensor, full: torch.Tensor) -> None:
    """Copy a whole tensor, the same on every rank, into one that may be cut up."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            full = distribute_tensor(full.to(target.dtype), target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(full)
