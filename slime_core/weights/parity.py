"""A prompt whose log-probabilities engine and trainer must agree on: what tells that they compute the same model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from slime_core.errors import WeightsDifferError
from slime_core.options import Options
from slime_core.types import FloatArray
from slime_core.weights.source import engine_dtype

NUM_TOKENS = 32
SAME_DTYPE_BOUND, OTHER_DTYPE_BOUND, QUANTISED_BOUND = 1e-3, 0.3, 0.5
"""Largest mean |difference| in nats: both sides in float32, or one of them in a shorter type, or in FP8.

Random tokens are improbable ones, which rounding moves most: 28 layers of random weights give them log-probabilities in
bfloat16 that are 0.1 off on average, where another model's would be nats off.
"""


def probe_tokens(vocab_size: int, seed: int) -> list[int]:
    """A prompt of random tokens, the same in every run of a seed."""
    tokens: list[int] = np.random.default_rng(seed).integers(0, vocab_size, NUM_TOKENS).tolist()
    return tokens


def bound(args: Options, trainer_dtype: str, quantised: bool = False) -> float:
    """The largest mean difference that is rounding and not another model."""
    if args.weights_check_bound is not None:
        return float(args.weights_check_bound)
    if quantised:
        return QUANTISED_BOUND
    both = trainer_dtype == "float32" == engine_dtype(args)
    return SAME_DTYPE_BOUND if both else OTHER_DTYPE_BOUND


def check(own: FloatArray, engines: Mapping[str, Sequence[float]], limit: float, version: int) -> float:
    """Refuse engines whose log-probabilities are not the trainer's; gives the largest mean difference.

    Args:
        own: [n] the trainer's log-probability of every token of the prompt but the first.
        engines: URL -> the engine's, likewise.

    Raises:
        WeightsDifferError: naming the engine and the difference.
    """
    worst = 0.0
    for url, given in engines.items():
        difference = float(np.abs(np.asarray(given, np.float64) - own).mean())
        if not difference <= limit:
            raise WeightsDifferError(
                f"{url} and the trainer disagree on a prompt's log-probabilities under weights {version}: mean "
                f"|difference| {difference:.3g}, where {limit:g} is allowed. The engine does not compute the model "
                "that is trained: other weights, another dtype, or a model it gets wrong. --weights-check-bound sets "
                "the bound."
            )
        worst = max(worst, difference)
    return worst
