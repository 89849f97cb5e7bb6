"""What has the weights, and what of it goes to the engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from slime_core.options import Options
from slime_core.types import FloatArray

NamedTensors = Iterable[tuple[str, torch.Tensor]]
SGLANG_DTYPES = {
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}


class WeightSource(Protocol):
    """The trainer's rank 0."""

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""

    @property
    def dtype(self) -> str:
        """Of the weights, for example `float32`."""

    def weights(self, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Contiguous tensors under Hugging Face names, floating-point ones as `dtype`, in one order."""

    def prompt_logprobs(self, tokens: Sequence[int]) -> FloatArray:
        """Log-probabilities, at temperature 1, of every token of a prompt but the first."""

    def free_cache(self) -> None:
        """Give engines on the trainers' GPUs the memory that torch keeps for later, on every rank."""


@dataclass(frozen=True)
class Update:
    """One version of the weights on its way."""

    version: int
    tensors: Callable[[], NamedTensors]
    """Gives them anew with every call, in the engines' dtype."""
    checksums: Mapping[str, str]
    """By name, as the embedded engine computes them; empty for others."""


def engine_dtype(args: Options) -> str | None:
    """The dtype in which the engines hold the weights; None where only SGLang knows (`--sglang-dtype auto`)."""
    if args.engine == "embedded":
        return str(args.engine_dtype)
    return SGLANG_DTYPES.get((args.sglang.get("dtype") or ["auto"])[0])
