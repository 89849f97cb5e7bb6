"""Draw the next token of every running sequence at once.

Sampling is by inverse transform: one uniform number a row, a cumulative sum and a binary search. That costs a tenth of
`torch.multinomial` on small vocabularies, and makes a request reproducible: its uniforms depend on its own seed and on
how many tokens it has, never on its batch mates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

GOLDEN = 0x9E3779B97F4A7C15  # the increment of splitmix64 (Steele, Lea, Flood 2014)
MASK_64 = (1 << 64) - 1

IntArray = npt.NDArray[np.int64]
SeedArray = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Controls:
    """Per-row sampling controls of B rows; greedy rows carry temperature 1 and no truncation."""

    temperature: torch.Tensor  # [B] float32
    greedy: torch.Tensor  # [B] bool
    top_k: torch.Tensor  # [B] int64, the vocabulary's size where off
    top_p: torch.Tensor  # [B] float32, 1 where off
    min_p: torch.Tensor  # [B] float32, 0 where off
    truncated: torch.Tensor | None  # row indices with top-k, top-p or min-p, None when there are none
    any_tempered: bool
    any_greedy: bool
    all_greedy: bool


def spread_seed(seed: int) -> int:
    """Turn a user's seed into 64 well-mixed bits, so that neighbouring seeds give unrelated streams."""
    mixed = _mix(np.array([(seed * GOLDEN) & MASK_64], dtype=np.uint64))
    return int(mixed[0])


def uniforms(seeds: SeedArray, steps: IntArray) -> npt.NDArray[np.float64]:
    """Return one uniform number in [0, 1) a row from its spread seed [B] and its number of tokens so far [B]."""
    counters = (steps.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    # 52 bits: u * total then stays below total in float64, so a search never runs off the end
    return (_mix(seeds + counters) >> np.uint64(12)).astype(np.float64) * np.float64(2.0**-52)


def _mix(values: SeedArray) -> SeedArray:
    """Apply splitmix64's output function elementwise."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def sample(logits: torch.Tensor, controls: Controls, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row.

    logits: [B, V]; uniform: [B] float64 in [0, 1). Returns tokens [B] int64 and their log-probabilities [B] float32 at
    the sampling temperature, over the whole vocabulary (top-k, top-p and min-p do not change them). Greedy rows take
    the argmax and report the log-probability at temperature 1.
    """
    logits = logits.float()
    if controls.any_tempered:
        logits = logits / controls.temperature[:, None]
    probs = torch.softmax(logits, dim=-1)
    if controls.all_greedy:
        tokens = probs.argmax(dim=-1)
    else:
        tokens = draw(probs, uniform)
        if (rows := controls.truncated) is not None:
            kept = (controls.top_k[rows], controls.top_p[rows], controls.min_p[rows])
            tokens[rows] = draw_truncated(probs[rows], uniform[rows], *kept)
        if controls.any_greedy:
            tokens = torch.where(controls.greedy, probs.argmax(dim=-1), tokens)
    return tokens, probs.gather(1, tokens[:, None]).squeeze(1).log()


def draw(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw one column a row from unnormalised probabilities [B, V] by inverse transform; returns [B] int64."""
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)
    target = (uniform * cdf[:, -1])[:, None]
    # right=True: the first column whose cumulative sum exceeds the target, hence never one of probability 0
    return torch.searchsorted(cdf, target, right=True).squeeze(1).clamp_(max=probs.shape[-1] - 1)


def draw_truncated(
    probs: torch.Tensor, uniform: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Draw one column a row from [B, V] probabilities restricted by top-k, top-p and min-p; returns [B] int64.

    As SGLang does it: all three look at the untruncated probabilities. A token stays if its rank is below top_k, the
    tokens ranked before it hold at most top_p, and it has at least min_p times the largest probability.
    """
    largest_k = int(top_k.max())
    ranked, columns = probs.topk(largest_k, dim=-1) if largest_k < probs.shape[-1] else probs.sort(-1, descending=True)
    before = ranked.cumsum(dim=-1, dtype=torch.float64) - ranked
    keep = torch.arange(ranked.shape[-1])[None, :] < top_k[:, None]
    keep &= before <= top_p[:, None]
    keep &= ranked >= ranked[:, :1] * min_p[:, None]
    keep[:, 0] = True
    picked = draw(ranked * keep, uniform)
    return columns.gather(1, picked[:, None]).squeeze(1)


def penalize(
    logits: torch.Tensor, counts: torch.Tensor, seen: torch.Tensor, frequency: float, presence: float, repetition: float
) -> torch.Tensor:
    """Apply one row's penalties to its logits [V].

    counts: [V] how often each token was generated; seen: [V] bool, tokens of the prompt or generated. Frequency and
    presence are subtracted (OpenAI's definition); repetition divides positive and multiplies negative logits of seen
    tokens (Keskar et al. 2019, CTRL).
    """
    logits = logits - frequency * counts - presence * (counts > 0)
    if repetition == 1.0:
        return logits
    return torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
