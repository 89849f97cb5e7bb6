"""Context parallelism: which tokens of a packed row this rank has, and what the ranks have, put together again.

Each sequence is cut into 2 * size chunks, of which rank r has the r-th from either end: under a causal mask all ranks
then have the same work (Dubey et al., "The Llama 3 Herd of Models", arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from slime_core.types import IntArray


def own_tokens(lengths: IntArray, rank: int, size: int) -> IntArray:
    """[T / size] places in the row of a rank's tokens; every length is a multiple of 2 * size."""
    starts = np.cumsum(lengths) - lengths
    chunks = lengths // (2 * size)
    spans = [
        np.arange(first, first + chunk)
        for start, length, chunk in zip(starts, lengths, chunks, strict=True)
        for first in (start + rank * chunk, start + length - (rank + 1) * chunk)
    ]
    return np.concatenate(spans).astype(np.int64)


@dataclass(frozen=True)
class Cut:
    """A row of T tokens over the ranks of a group."""

    own: torch.Tensor
    """[T / size] int64, places in the row of this rank's tokens."""
    gathered: torch.Tensor
    """[T] int64, where each token of the row lies in what the ranks have, one after the other."""
    group: dist.ProcessGroup

    @classmethod
    def of(cls, lengths: IntArray, group: dist.ProcessGroup, device: torch.device) -> Cut:
        """The cut of sequences of these lengths, multiples of 2 * size."""
        everyone = [own_tokens(lengths, rank, group.size()) for rank in range(group.size())]
        gathered = np.argsort(np.concatenate(everyone))
        return cls(torch.from_numpy(everyone[group.rank()]).to(device), torch.from_numpy(gathered).to(device), group)

    def whole(self, part: torch.Tensor, *, alike: bool) -> torch.Tensor:
        """[T / size, ...] of every rank -> [T, ...], on every rank.

        Args:
            part: this rank's.
            alike: all ranks compute the same from the whole, so that the gradient is this rank's own; otherwise the
                gradients of all ranks are summed.
        """
        every = gather_from_sequence_parallel_region(part, tensor_parallel_output_grad=not alike, group=self.group)
        return every.index_select(0, self.gathered)

    def local(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of the places [R] in the row are this rank's, [R] bool, and where those lie among its tokens."""
        at = self.gathered[places]
        mine = at // len(self.own) == self.group.rank()
        return mine, at[mine] % len(self.own)
