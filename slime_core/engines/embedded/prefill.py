"""How prompts are laid out for a prefill: groups of similar length, doubles run once, tokens aligned to the right."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from slime_core.engines.embedded.request import Request

PREFILL_TOKENS = 8192  # padded tokens a group, at most


def prefill_groups(requests: list[Request]) -> list[list[Request]]:
    """Group requests of similar length, scoring ones and such that generate nothing apart, within a token budget."""
    groups: list[list[Request]] = []
    kind: tuple[bool, bool] | None = None
    shortest = 0
    for request in sorted(requests, key=_kind_and_length):
        length = len(request.prompt) + len(request.output_ids)
        group = groups[-1] if groups and kind == _kind(request) else None
        if group is None or length > 2 * shortest + 16 or (len(group) + 1) * length > PREFILL_TOKENS:
            groups.append([request])
            kind, shortest = _kind(request), length
        else:
            group.append(request)
    return groups


def first_of_each(group: list[Request]) -> tuple[list[Request], torch.Tensor]:
    """Reorder a group so that one request of each distinct token list comes first, then their doubles.

    Returns the reordered group, and for each of its members [n] the place of the first one with its tokens.
    """
    places: dict[tuple[int, ...], int] = {}
    firsts: list[Request] = []
    doubles: list[tuple[Request, int]] = []
    for request in group:
        tokens = (*request.prompt, *request.output_ids)
        place = places.setdefault(tokens, len(firsts))
        if place == len(firsts):
            firsts.append(request)
        else:
            doubles.append((request, place))
    sources = [*range(len(firsts)), *(place for _, place in doubles)]
    return firsts + [request for request, _ in doubles], torch.tensor(sources)


def _kind(request: Request) -> tuple[bool, bool]:
    return request.wants_prompt_logprobs, request.limit == 0


def _kind_and_length(request: Request) -> tuple[bool, bool, int]:
    return *_kind(request), len(request.prompt) + len(request.output_ids)


def right_aligned(sequences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-pad token lists; returns tokens and positions [rows, longest], both padded with 0 and -1."""
    longest = max(len(sequence) for sequence in sequences)
    tokens = np.zeros((len(sequences), longest), dtype=np.int64)
    for row, sequence in enumerate(sequences):
        tokens[row, longest - len(sequence) :] = sequence
    starts = np.array([longest - len(sequence) for sequence in sequences])
    positions: npt.NDArray[np.int64] = np.maximum(np.arange(longest)[None, :] - starts[:, None], -1)
    return torch.from_numpy(tokens), torch.from_numpy(positions)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [rows, n] at temperature 1 of tokens [rows, n] under the logits [rows, n, V] before them."""
    logits = logits.float()
    chosen = logits.gather(-1, tokens[..., None]).squeeze(-1)
    return chosen - torch.logsumexp(logits, dim=-1)


def store_prompt_logprobs(group: list[Request], scores: torch.Tensor) -> None:
    """Give each request the log-probabilities of its prompt after `logprob_start`; scores: [rows, longest - 1]."""
    for row, request in enumerate(group):
        # the last len - 1 columns belong to the row; a retracted request's generated tokens come after its prompt
        own = scores[row, scores.shape[1] - (len(request.prompt) + len(request.output_ids) - 1) :]
        request.prompt_logprobs = own[request.logprob_start : len(request.prompt) - 1].tolist()
