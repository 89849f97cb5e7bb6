"""What rank 0 is asked for between rounds, done by all ranks: weights and a prompt's log-probabilities.

Only rank 0 speaks with the engines and knows how often the weights are read. Where a model is cut up among the ranks,
the others have to take part in every gathering, so rank 0 tells them what comes next.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from slime_core.training.trainer import Trainer
from slime_core.types import FloatArray


class Leader:
    """The trainer of rank 0 as a source of weights that the other ranks follow; see `leading`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._unread: Iterator[tuple[str, torch.Tensor]] = iter(())

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        return self._trainer.vocab_size

    @property
    def dtype(self) -> str:
        """Of the weights, for example `float32`."""
        return self._trainer.dtype

    def weights(self, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
        """As `Trainer.weights`; one that is not read to its end is void after the next call."""
        self.tell({"do": "weights", "dtype": dtype})
        self._unread = self._trainer.weights(dtype)
        return self._unread

    def prompt_logprobs(self, tokens: Sequence[int]) -> FloatArray:
        """As `Trainer.prompt_logprobs`."""
        self.tell({"do": "prompt_logprobs", "tokens": list(tokens)})
        return self._trainer.prompt_logprobs(tokens)

    def free_cache(self) -> None:
        """Free the memory that torch keeps for later, on every rank."""
        self.tell({"do": "free_cache"})
        free_cache()

    def tell(self, message: dict[str, object]) -> None:
        """Announce the next thing to the other ranks, which may still be gathering weights that nobody read here."""
        deque(self._unread, maxlen=0)
        self._unread = iter(())
        self._trainer.broadcast(message)


@contextmanager
def leading(trainer: Trainer) -> Iterator[Leader]:
    """Let the other ranks, which must `follow` meanwhile, take part in what the body asks of rank 0."""
    leader = Leader(trainer)
    try:
        yield leader
    finally:
        leader.tell({"do": "return"})


def follow(trainer: Trainer) -> None:
    """Do what rank 0 announces until its `leading` ends."""
    while (message := trainer.broadcast(None))["do"] != "return":
        if message["do"] == "weights":
            deque(trainer.weights(message["dtype"]), maxlen=0)
        elif message["do"] == "free_cache":
            free_cache()
        else:
            trainer.prompt_logprobs(message["tokens"])


def free_cache() -> None:
    """Give the GPU's other processes the memory that torch keeps for later; without a GPU there is none."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
