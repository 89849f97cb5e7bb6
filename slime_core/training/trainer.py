"""What the cluster calls on a trainer of any backend, one object a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.types import FloatArray, Shard

if TYPE_CHECKING:
    import torch


class Trainer(Protocol):
    """One rank. Every rank gets the same calls in the same order: any of them may need all ranks."""

    def train(self, step: int, shard: Shard) -> dict[str, float]:
        """Train one round and return its metrics, the same on every rank.

        Raises:
            SlimeError: when the round lacks what the chosen estimator or loss needs.
        """

    def early_logprobs(self, shard: Shard) -> dict[str, Any]:
        """What training these samples will need of frozen models and of the policy as it is now.

        `sample_index` [S], `response_lengths` [S], and `ref_logprobs` and `old_logprobs`, float32 [R], NaN at samples
        that are not trained, where the options need them.
        """

    def weights(self, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Contiguous tensors under Hugging Face names, floating-point ones as `dtype`, in one order.

        Every rank must read to the end; what the others than rank 0 get is not defined. One whole tensor at a time is
        in memory.
        """

    def prompt_logprobs(self, tokens: Sequence[int]) -> FloatArray:
        """Log-probabilities, at temperature 1, of every token of a prompt but the first: [n - 1]."""

    def broadcast(self, message: dict[str, Any] | None) -> dict[str, Any]:
        """Rank 0's JSON-able message, on every rank."""

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""

    @property
    def dtype(self) -> str:
        """Of the weights, for example `float32`."""

    def save(self, directory: Path) -> None:
        """Write the training state to `directory/trainer`, or begin to: `saved` tells when it is done.

        Raises:
            CheckpointError: when it cannot be written.
        """

    def saved(self, *, wait: bool) -> bool:
        """Whether all of the last `save` is written; waits until it is, or looks.

        Raises:
            CheckpointError: when it cannot be written.
        """

    def export(self, directory: Path) -> None:
        """Write the model to a directory as transformers reads it.

        Raises:
            CheckpointError: when it cannot be written.
        """

    def load(self, directory: Path) -> None:
        """Go on exactly from what `save` wrote.

        Raises:
            CheckpointError: when there is no such checkpoint, or it does not fit the model.
        """

    def close(self) -> None:
        """Leave the process group and let go of the plugins."""
