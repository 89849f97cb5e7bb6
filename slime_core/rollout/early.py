"""Log-probabilities found early: groups that are sure to be trained go to the trainers while others still generate."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from slime_core.types import FloatArray, Group, IntArray, TrainBatch

Found = dict[str, Any]
"""One rank's answer: `sample_index`, `response_lengths` [S], and log-probabilities [R] by name, NaN where unknown."""


class Early:
    """What was handed out in a round, and what came back; used on the event loop."""

    def __init__(self) -> None:
        self._waiting: list[Group] = []
        self._taken: dict[int, tuple[IntArray, int]] = {}
        """Index of a sample -> tokens and number of response tokens that were handed out."""
        self._found: dict[int, dict[str, FloatArray]] = {}
        self._all_back = asyncio.Event()
        self._all_back.set()
        self._closed = False

    def keep(self, group: Group) -> None:
        """A group that will be trained."""
        self._waiting.append(group)

    def take(self) -> TrainBatch | None:
        """The groups kept since the last call; None where there are none, or the round is about to be packed."""
        samples = [sample for group in self._waiting for sample in group]
        if self._closed or not samples:
            return None
        self._waiting.clear()
        self._all_back.clear()
        batch = TrainBatch.from_samples(samples)
        for sample, end in zip(samples, np.cumsum(batch.lengths).tolist(), strict=True):
            self._taken[sample.index] = batch.tokens[end - len(sample.tokens) : end], sample.response_length
        return batch

    def note(self, answers: Sequence[Found]) -> None:
        """What the ranks found for the batch that was taken."""
        for answer in answers:
            ends = np.cumsum(answer["response_lengths"]).tolist()
            for row, index in enumerate(answer["sample_index"].tolist()):
                span = slice(ends[row] - int(answer["response_lengths"][row]), ends[row])
                names = answer.keys() - {"sample_index", "response_lengths"}
                self._found[index] = {name: answer[name][span] for name in names}
        self._all_back.set()

    async def close(self) -> None:
        """Hand out nothing more, and return when the last answer is here."""
        self._closed = True
        await self._all_back.wait()

    def fill(self, batch: TrainBatch) -> tuple[TrainBatch, float]:
        """The batch with what was found as keys a token, and the share of its response tokens that have it.

        A sample whose tokens a converter has changed since counts as unknown.
        """
        if not self._found:
            return batch, 0.0
        names = sorted({name for found in self._found.values() for name in found})
        ends, response_ends = np.cumsum(batch.lengths), np.cumsum(batch.response_lengths)
        keys = {name: np.full(len(batch.loss_mask), np.nan, np.float32) for name in names}
        num_known = 0
        for row, index in enumerate(batch.sample_index.tolist()):
            length, responses = int(batch.lengths[row]), int(batch.response_lengths[row])
            tokens = batch.tokens[ends[row] - length : ends[row]]
            if index not in self._found:
                continue
            taken, num_responses = self._taken[index]
            if num_responses != responses or not np.array_equal(taken, tokens):
                continue
            num_known += responses
            for name, values in self._found[index].items():
                keys[name][response_ends[row] - responses : response_ends[row]] = values
        return replace(batch, per_token=keys | batch.per_token), num_known / max(1, len(batch.loss_mask))
