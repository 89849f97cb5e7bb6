"""The running sequences, held as arrays over the cache's slots: row i of every array is slot i.

Rows 0..len-1 are in use. Nothing here walks over rows in Python on a plain decode step; only requests with logit
adjustments, stop strings or stop ids of their own cost Python work a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slime_core.engines.embedded.request import Request
from slime_core.engines.embedded.sampling import Controls, penalize, uniforms

OUTPUT_BLOCK = 128


class RunningBatch:
    """Per-row state of the running requests.

    length: positions of the row whose keys and values are stored; last_token: the token to feed next; count: tokens
    generated so far; limit: the most it may generate.
    """

    def __init__(self, max_rows: int, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self.requests: list[Request] = []
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.length = np.zeros(max_rows, dtype=np.int64)
        self.last_token = np.zeros(max_rows, dtype=np.int64)
        self.count = np.zeros(max_rows, dtype=np.int64)
        self.limit = np.zeros(max_rows, dtype=np.int64)
        self.seed = np.zeros(max_rows, dtype=np.uint64)
        self.temperature = np.ones(max_rows, dtype=np.float32)
        self.greedy = np.zeros(max_rows, dtype=bool)
        self.top_k = np.zeros(max_rows, dtype=np.int64)
        self.top_p = np.ones(max_rows, dtype=np.float32)
        self.min_p = np.zeros(max_rows, dtype=np.float32)
        self.truncated = np.zeros(max_rows, dtype=bool)
        self.adjusted = np.zeros(max_rows, dtype=bool)
        self.heeds_eos = np.zeros(max_rows, dtype=bool)
        self.own_stops = np.zeros(max_rows, dtype=bool)
        self.output_ids = np.zeros((max_rows, OUTPUT_BLOCK), dtype=np.int32)
        self.output_logprobs = np.zeros((max_rows, OUTPUT_BLOCK), dtype=np.float32)
        self.last_logprob = np.zeros(max_rows, dtype=np.float32)
        self.is_eos = np.zeros(vocab_size, dtype=bool)
        self.is_eos[[token for token in eos_ids if token < vocab_size]] = True

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request) -> int:
        """Give a request the next free row and return it; what it generated before (a retraction) is taken along."""
        row, params = len(self.requests), request.params
        self.requests.append(request)
        self.length[row] = 0
        self.count[row] = len(request.output_ids)
        self.last_logprob[row] = 0.0
        self.limit[row] = request.limit
        self.seed[row] = request.seed
        self.temperature[row] = 1.0 if params.greedy else params.temperature
        self.greedy[row] = params.greedy
        self.top_k[row] = params.top_k if params.top_k > 0 else self.vocab_size
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.truncated[row] = params.truncated
        self.adjusted[row] = params.adjusted
        self.heeds_eos[row] = not params.ignore_eos
        self.own_stops[row] = bool(params.stop) or (bool(params.stop_token_ids) and not params.ignore_eos)
        self._make_room(len(request.output_ids))
        self.output_ids[row, : self.count[row]] = request.output_ids
        self.output_logprobs[row, : self.count[row]] = request.output_logprobs
        return row

    def remove(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Free rows and close the gaps with rows from the end; returns the (source, target) moves made, in order."""
        moves = []
        for row in sorted(rows, reverse=True):
            last = len(self.requests) - 1
            if row != last:
                for array in self._row_arrays():
                    array[row] = array[last]
                self.requests[row] = self.requests[last]
                moves.append((last, row))
            self.requests.pop()
        return moves

    def record(self, start: int, stop: int, tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]) -> None:
        """Append one sampled token [stop - start] and its log-probability to each of the rows start..stop-1."""
        count = self.count[start:stop]
        self._make_room(int(count.max()) + 1)
        rows = np.arange(start, stop)
        self.output_ids[rows, count] = tokens
        self.output_logprobs[rows, count] = logprobs
        self.last_token[start:stop] = tokens
        self.last_logprob[start:stop] = logprobs
        self.count[start:stop] += 1

    def _row_arrays(self) -> list[npt.NDArray[Any]]:
        return [value for name, value in vars(self).items() if isinstance(value, np.ndarray) and name != "is_eos"]

    def _make_room(self, tokens: int) -> None:
        have = self.output_ids.shape[1]
        if tokens > have:
            extra = max(have, -(-tokens // OUTPUT_BLOCK) * OUTPUT_BLOCK - have)
            self.output_ids = np.pad(self.output_ids, ((0, 0), (0, extra)))
            self.output_logprobs = np.pad(self.output_logprobs, ((0, 0), (0, extra)))

    def outputs(self, row: int) -> tuple[list[int], list[float]]:
        """The tokens and log-probabilities a row has generated so far."""
        count = self.count[row]
        return self.output_ids[row, :count].tolist(), self.output_logprobs[row, :count].tolist()

    def suspects(self) -> npt.NDArray[np.bool_]:
        """Which rows [B] may have ended: at their limit, an EOS, a broken logit, or stops of their own to check."""
        rows = slice(0, len(self.requests))
        ended = self.is_eos[self.last_token[rows]] & self.heeds_eos[rows]
        ended |= self.count[rows] >= self.limit[rows]
        return ended | self.own_stops[rows] | ~np.isfinite(self.last_logprob[rows])

    def controls(self, start: int, stop: int) -> Controls:
        """The sampling controls of rows start..stop-1."""
        rows = slice(start, stop)
        greedy, truncated = self.greedy[rows], self.truncated[rows]
        return Controls(
            temperature=torch.from_numpy(self.temperature[rows]),
            greedy=torch.from_numpy(greedy),
            top_k=torch.from_numpy(self.top_k[rows]),
            top_p=torch.from_numpy(self.top_p[rows]),
            min_p=torch.from_numpy(self.min_p[rows]),
            truncated=torch.from_numpy(truncated.nonzero()[0]) if truncated.any() else None,
            any_tempered=bool((self.temperature[rows] != 1.0).any()),
            any_greedy=bool(greedy.any()),
            all_greedy=bool(greedy.all()),
        )

    def uniforms(self, start: int, stop: int) -> torch.Tensor:
        """The next uniform number [stop - start] of each row's own stream."""
        return torch.from_numpy(uniforms(self.seed[start:stop], self.count[start:stop]))

    def adjust(self, logits: torch.Tensor, start: int) -> torch.Tensor:
        """Apply penalties, biases and minimum lengths to the logits [rows, V] of rows from `start` on that have any."""
        rows = self.adjusted[start : start + logits.shape[0]].nonzero()[0]
        if rows.size == 0:
            return logits
        logits = logits.float().clone()
        for index in rows:
            logits[index] = self._adjusted(logits[index], start + int(index))
        return logits

    def _adjusted(self, logits: torch.Tensor, row: int) -> torch.Tensor:
        request = self.requests[row]
        params = request.params
        generated = torch.from_numpy(self.output_ids[row, : self.count[row]].astype(np.int64))
        counts = torch.bincount(generated, minlength=self.vocab_size)
        seen = counts > 0
        seen[torch.tensor(request.prompt)] = True
        logits = penalize(
            logits, counts, seen, params.frequency_penalty, params.presence_penalty, params.repetition_penalty
        )
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        if self.count[row] < params.min_new_tokens:
            logits[torch.from_numpy(self.is_eos)] = -torch.inf
            logits[list(params.stop_token_ids)] = -torch.inf
        return logits


def abort_reason(message: str = "Aborted", status_code: int | None = None) -> dict[str, Any]:
    """SGLang's finish_reason of an aborted request."""
    return {"type": "abort", "message": message, "status_code": status_code, "err_type": None}
