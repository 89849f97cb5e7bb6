"""Continuous batching: which requests run, and one step of the model for all of them.

A scheduler belongs to one thread. Requests wait in arrival order; those that fit are prefilled in groups of similar
length onto the rows after the running ones, then every running row decodes one token a step. A finished row leaves at
once and the last row takes its place.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from slime_core.engines.embedded.batch import RunningBatch, abort_reason
from slime_core.engines.embedded.detokenize import matched_stop, tail_length
from slime_core.engines.embedded.language_model import LanguageModel
from slime_core.engines.embedded.prefill import (
    first_of_each,
    prefill_groups,
    right_aligned,
    store_prompt_logprobs,
    token_logprobs,
)
from slime_core.engines.embedded.request import Output, Request
from slime_core.engines.embedded.sampling import sample
from slime_core.engines.embedded.slot_cache import SlotCache

PREFILL_NUMBERS = 2**25  # numbers in its mask or its logits, at most (128 MiB in fp32)
JOIN_STEPS = 4  # decode steps for which newcomers gather before they join a large batch, at most
JOIN_SHARE = 8  # they join at once when they are as many as the running rows divided by this

Finished = tuple[Request, Output]


class Scheduler:
    """Waiting and running requests of one model.

    max_rows: most sequences that run together. max_kv_bytes: most memory for keys and values; a request waits while
    the rows' longest possible lengths would exceed it.
    """

    def __init__(self, language_model: LanguageModel, max_rows: int, max_kv_bytes: int) -> None:
        self.language_model = language_model
        self.cache = SlotCache()
        self.batch = RunningBatch(max_rows, language_model.vocab_size, language_model.eos_ids)
        self.waiting: deque[Request] = deque()
        self.joining: list[Request] = []  # taken from the queue, not all prefilled yet
        self.finished: list[Finished] = []
        self.weight_version = "default"
        self.admitting = True
        self.max_kv_bytes = max_kv_bytes
        self._steps_since_join = 0

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return len(self.batch) > 0 or (self.admitting and len(self.waiting) > 0)

    def step(self) -> None:
        """Admit and prefill what fits, else decode one token for every running request; ended ones go to `finished`."""
        self.joining = self._admit() if self.admitting else []
        if self.joining:
            self._steps_since_join = 0
            self._prefill(self.joining)
            self.joining = []
        else:
            self._steps_since_join += 1
            self._decode()
        self._retire()

    def take_finished(self) -> list[Finished]:
        """Hand out the requests that ended since the last call."""
        finished, self.finished = self.finished, []
        return finished

    def progress(self) -> list[Finished]:
        """The output so far of every running request that streams."""
        return [
            (request, self._output(request, *self.batch.outputs(row), None))
            for row, request in enumerate(self.batch.requests)
            if request.stream
        ]

    def unanswered(self) -> list[Request]:
        """Every request that has not ended, wherever it is; also right after a step that raised."""
        requests = (*self.batch.requests, *self.joining, *self.waiting)
        return list({id(request): request for request in requests}.values())

    # -- admission -------------------------------------------------------------------------------------------------

    def _admit(self) -> list[Request]:
        """Take from the queue, in order, what rows and memory allow."""
        joined: list[Request] = []
        newcomers = min(len(self.waiting), self.batch.max_rows - len(self.batch))
        # each prefill costs a forward in which the running rows stand still
        few = newcomers * JOIN_SHARE < len(self.batch) and self._steps_since_join < JOIN_STEPS
        if newcomers == 0 or few:
            return joined
        longest = max((len(r.prompt) + r.limit for r in self.batch.requests), default=0)
        while self.waiting and len(self.batch) + len(joined) < self.batch.max_rows:
            request = self.waiting[0]
            longest = max(longest, len(request.prompt) + request.limit)
            rows = len(self.batch) + len(joined) + 1
            if rows > 1 and rows * longest * self.language_model.kv_token_bytes > self.max_kv_bytes:
                break
            joined.append(self.waiting.popleft())
        return joined

    def _longest_now(self, rows: int) -> int:
        return int(self.batch.length[:rows].max()) if rows else 0

    # -- prefill ---------------------------------------------------------------------------------------------------

    def _prefill(self, joined: list[Request]) -> None:
        """Run the prompts (and, after a retraction, what was generated) of new requests, in groups."""
        now = time.time()
        for group in prefill_groups(joined):
            group, sources = first_of_each(group)
            start = len(self.batch)
            for request in group:
                request.admitted_s = request.admitted_s or now
                request.mark_version(self.weight_version, len(request.output_ids))
                self.batch.add(request)
            self._prefill_group(group, sources, start)

    @torch.inference_mode()
    def _prefill_group(self, group: list[Request], sources: torch.Tensor, start: int) -> None:
        """Run the distinct ones of a group, and copy their keys and values to the rows of their doubles."""
        rows, stop = int(sources.max()) + 1, start + len(group)
        tokens, positions = right_aligned([request.prompt + request.output_ids for request in group[:rows]])
        length = tokens.shape[1]
        self.cache.reserve(stop, max(length, self._longest_now(start)))
        scoring = group[0].wants_prompt_logprobs
        scores: list[torch.Tensor] = []
        logits = torch.empty(0)
        chunk = self._chunk_length(rows, length, scoring)
        for begin in range(0, length, chunk):
            columns = slice(begin, min(begin + chunk, length))
            width = columns.stop
            logits = self.language_model.forward(
                self.cache, start, tokens[:, columns], positions[:, columns], width, scoring
            )
            if scoring:
                following = tokens[:, begin + 1 : columns.stop + 1]
                scores.append(token_logprobs(logits[:, : following.shape[1]], following))
        if scoring:
            store_prompt_logprobs(group, torch.cat(scores, dim=1)[sources])
        self.cache.fan_out(start + sources[rows:], start + rows, length)
        self.batch.length[start:stop] = (positions >= 0).sum(dim=1)[sources].numpy()
        if group[0].limit > 0:
            self._sample(logits[:, -1][sources], start, stop)

    def _chunk_length(self, rows: int, length: int, scoring: bool) -> int:
        """How many columns of a prefill to run at once, so that masks and logits stay small."""
        numbers = rows * max(length, self.language_model.vocab_size if scoring else 0)
        return max(1, min(length, PREFILL_NUMBERS // numbers))

    # -- decode ----------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """Feed every running row its last token and sample the next."""
        rows = len(self.batch)
        if rows == 0:
            return
        positions = self.batch.length[:rows]
        width = int(positions.max()) + 1
        self.cache.reserve(rows, width)
        logits = self.language_model.forward(
            self.cache,
            0,
            torch.from_numpy(self.batch.last_token[:rows, None]),
            torch.from_numpy(positions[:, None]),
            width,
            keep_all=False,
        )
        self.batch.length[:rows] += 1
        self._sample(logits[:, -1], 0, rows)

    @torch.inference_mode()
    def _sample(self, logits: torch.Tensor, start: int, stop: int) -> None:
        logits = self.batch.adjust(logits, start)
        controls = self.batch.controls(start, stop)
        tokens, logprobs = sample(logits, controls, self.batch.uniforms(start, stop))
        self.batch.record(start, stop, tokens.numpy(), logprobs.numpy())

    # -- endings ---------------------------------------------------------------------------------------------------

    def _retire(self) -> None:
        """Find the rows that ended, answer them and close the gaps."""
        rows = len(self.batch)
        if rows == 0:
            return
        suspects = self.batch.suspects()
        if not suspects.any():
            return
        ends = {int(row): reason for row in suspects.nonzero()[0] if (reason := self._finish_reason(int(row)))}
        self._end(ends)

    def _finish_reason(self, row: int) -> dict[str, Any] | None:
        """Why a row ends now, in SGLang's order of precedence; None when it goes on."""
        batch, params = self.batch, self.batch.requests[row].params
        count, token = int(batch.count[row]), int(batch.last_token[row])
        if not np.isfinite(batch.last_logprob[row]):
            return abort_reason("the model gave logits that are not finite", 500)
        if count >= batch.limit[row]:
            return {"type": "length", "length": count}
        if batch.heeds_eos[row] and (batch.is_eos[token] or token in params.stop_token_ids):
            return {"type": "stop", "matched": token}
        if params.stop and self.language_model.tokenizer is not None:
            tail = batch.output_ids[row, max(0, count - tail_length(params)) : count].tolist()
            if (matched := matched_stop(self.language_model.tokenizer, tail, params)) is not None:
                return {"type": "stop", "matched": matched}
        return None

    def _end(self, reasons: dict[int, dict[str, Any]]) -> None:
        for row, reason in reasons.items():
            request = self.batch.requests[row]
            request.output_ids, request.output_logprobs = self.batch.outputs(row)
            self._answer(request, reason)
        self._free(list(reasons))

    def _free(self, rows: list[int]) -> None:
        moves = self.batch.remove(rows)
        if moves:
            for source, target in moves:
                self.cache.copy_row(source, target, int(self.batch.length[target]))
        if len(self.batch) == 0:
            self.cache.release()

    def _answer(self, request: Request, reason: dict[str, Any]) -> None:
        self.finished.append((request, self._output(request, request.output_ids, request.output_logprobs, reason)))

    def _output(self, request: Request, ids: list[int], logprobs: list[float], reason: dict[str, Any] | None) -> Output:
        starts = [*request.version_starts, (self.weight_version, len(ids))]
        spans = [(version, start, end) for (version, start), (_, end) in pairwise(starts) if end > start]
        return Output(ids, logprobs, reason, self.weight_version, spans, time.time())

    # -- control ---------------------------------------------------------------------------------------------------

    def abort(self, wanted: Callable[[Request], bool], reason: dict[str, Any] | None = None) -> None:
        """End the running and waiting requests for which `wanted` is true, with what they have."""
        reason = reason or abort_reason()
        self._end({row: reason for row, request in enumerate(self.batch.requests) if wanted(request)})
        kept: deque[Request] = deque()
        for request in self.waiting:
            if wanted(request):
                self._answer(request, reason)
            else:
                kept.append(request)
        self.waiting = kept

    def retract(self) -> None:
        """Put the running requests back to the head of the queue; their keys and values are computed anew later."""
        requests = list(self.batch.requests)
        for row, request in enumerate(requests):
            request.output_ids, request.output_logprobs = self.batch.outputs(row)
            request.retractions += 1
        self._free(list(range(len(requests))))
        self.waiting.extendleft(reversed(requests))

    def set_weight_version(self, version: str) -> None:
        """Name the weights that make the tokens from now on."""
        self.weight_version = version
        for row, request in enumerate(self.batch.requests):
            request.mark_version(version, int(self.batch.count[row]))
