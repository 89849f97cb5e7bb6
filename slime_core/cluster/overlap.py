"""`--overlap-logprobs`: trainers that would be idle while a round generates look at the groups that are finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray


class Overlap:
    """One batch at a time goes from the manager to the trainers, and what they found back; `poll` never waits."""

    def __init__(self, manager: Any, trainers: Sequence[Any], shares: Sequence[int], get: Callable[[Any], Any]) -> None:
        """`shares`: whose shard each trainer gets; those with parts of one copy of the model work on the same."""
        self._manager, self._trainers, self._shares, self._get = manager, trainers, shares, get
        self._asked: Any = None
        self._noting: Any = None
        self._computing: list[Any] = []

    def poll(self) -> None:
        """Pass on what is ready.

        Raises:
            SlimeError: when a trainer failed.
        """
        if self._noting is not None:
            if not ray.wait([self._noting], timeout=0)[0]:
                return
            self._get(self._noting)
            self._noting = None
        if self._computing:
            done, left = ray.wait(self._computing, num_returns=len(self._computing), timeout=0)
            self._get(done)  # a failure shows at once: other ranks may wait for the one that failed
            if not left:
                self._noting, self._computing = self._manager.note_early.remote(self._computing), []
            return
        if self._asked is None:
            self._asked = self._manager.take_early.remote()
        if not ray.wait([self._asked], timeout=0)[0]:
            return
        shards, self._asked = self._get(self._asked), None
        if shards is not None:
            pairs = zip(self._trainers, self._shares, strict=True)
            self._computing = [trainer.early_logprobs.remote([shards[share]]) for trainer, share in pairs]
