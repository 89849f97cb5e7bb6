"""Where a rank stands in Megatron's grid of tensor, pipeline, expert and data parallelism."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel

from slime_core.training.ranks import Ranks


@dataclass(frozen=True)
class MegatronRanks:
    """This process in the grid; as DataParallel, the ranks that share the round's samples."""

    world: Ranks
    data_parallel: Ranks
    """Those with the same part of the model."""

    @classmethod
    def join(
        cls, args: argparse.Namespace, rank: int, size: int, *, address: str, port: int, device: torch.device
    ) -> MegatronRanks:
        """Meet the other ranks at the address of rank 0 and form Megatron's groups: gloo on CPU, NCCL on CUDA."""
        world = Ranks.join(rank, size, address=address, port=port, device=device, group=True)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        if device.type == "cuda":
            tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
        group = parallel_state.get_data_parallel_group()
        return cls(world, Ranks(group.rank(), group.size(), device, True, group))

    @property
    def rank(self) -> int:
        """Of this process, in the world."""
        return self.world.rank

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.world.device

    @property
    def speaks(self) -> bool:
        """Whether this is the one of its model's parts that answers for the data-parallel rank: it has the loss."""
        first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
        return bool(first and parallel_state.is_pipeline_last_stage())

    def sum_(self, flat: torch.Tensor) -> torch.Tensor:
        """Sum a flat tensor over the data-parallel ranks, in place."""
        return self.data_parallel.sum_(flat)

    def gather(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The message of every data-parallel rank, from the part that speaks for it."""
        everyone = self.world.gather({"speaks": self.speaks, "message": message})
        return [one["message"] for one in everyone if one["speaks"]]

    def leave(self) -> None:
        """Close the process groups."""
        parallel_state.destroy_model_parallel()
        self.world.leave()
