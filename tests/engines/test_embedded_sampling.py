"""The vectorised sampler against naive references and against what its distribution must be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.engines.embedded.sampling import Controls, draw, penalize, sample, spread_seed, uniforms


def controls(
    rows: int,
    vocab: int,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
    greedy: bool = False,
) -> Controls:
    """The same controls for every row."""
    return Controls(
        temperature=torch.full((rows,), temperature),
        greedy=torch.full((rows,), greedy),
        top_k=torch.full((rows,), top_k if top_k > 0 else vocab),
        top_p=torch.full((rows,), top_p),
        min_p=torch.full((rows,), min_p),
        truncated=torch.arange(rows) if top_k > 0 or top_p < 1 or min_p > 0 else None,
        any_tempered=temperature != 1.0,
        any_greedy=greedy,
        all_greedy=greedy,
    )


def naive_distribution(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """The probabilities to sample from, token by token in plain Python."""
    scaled = [logit / temperature for logit in logits]
    weights = [np.exp(value - max(scaled)) for value in scaled]
    probs = [weight / sum(weights) for weight in weights]
    ranked = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept: list[int] = []
    mass_before = 0.0
    for rank, token in enumerate(ranked):
        within_k = top_k < 1 or rank < top_k
        if rank == 0 or (within_k and mass_before <= top_p and probs[token] >= min_p * probs[ranked[0]]):
            kept.append(token)
        mass_before += probs[token]
    total = sum(probs[token] for token in kept)
    return [probs[token] / total if token in kept else 0.0 for token in range(len(probs))]


distinct_logits = st.lists(
    st.integers(-40, 40).map(lambda number: number / 8), min_size=2, max_size=12, unique=True
)  # no ties, so that the ranking is the same everywhere


@settings(max_examples=60)
@given(
    logits=distinct_logits,
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 1, 2, 5]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_an_even_sweep_of_uniforms_gives_the_naive_distribution(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Inverse transform: evenly spaced uniforms reproduce the distribution to within their spacing, exactly."""
    sweep = 2000
    uniform = (torch.arange(sweep, dtype=torch.float64) + 0.5) / sweep
    rows = torch.tensor(logits).repeat(sweep, 1)
    tokens, _ = sample(rows, controls(sweep, len(logits), temperature, top_k, top_p, min_p), uniform)
    shares = torch.bincount(tokens, minlength=len(logits)).double() / sweep
    expected = naive_distribution(logits, temperature, top_k, top_p, min_p)
    assert shares.tolist() == pytest.approx(expected, abs=2 / sweep)


@settings(max_examples=40)
@given(logits=distinct_logits, temperature=st.sampled_from([0.3, 1.0, 2.0]), top_k=st.sampled_from([-1, 2]))
def test_logprobs_are_at_the_sampling_temperature_and_ignore_truncation(
    logits: list[float], temperature: float, top_k: int
) -> None:
    rows = torch.tensor([logits])
    tokens, logprobs = sample(rows, controls(1, len(logits), temperature, top_k), torch.tensor([0.4]).double())
    expected = torch.log_softmax(rows / temperature, dim=-1)[0, tokens[0]]
    assert logprobs.item() == pytest.approx(expected.item(), abs=1e-5)


def test_greedy_takes_the_largest_and_reports_temperature_one() -> None:
    logits = torch.tensor([[0.5, 2.0, 1.0]])
    tokens, logprobs = sample(logits, controls(1, 3, greedy=True), torch.tensor([0.99]).double())
    assert tokens.tolist() == [1]
    assert logprobs.item() == pytest.approx(torch.log_softmax(logits, -1)[0, 1].item(), abs=1e-6)


def test_greedy_and_sampled_rows_mix() -> None:
    logits = torch.tensor([[0.0, 3.0], [0.0, 3.0]])
    mixed = Controls(
        temperature=torch.ones(2),
        greedy=torch.tensor([True, False]),
        top_k=torch.tensor([2, 2]),
        top_p=torch.ones(2),
        min_p=torch.zeros(2),
        truncated=None,
        any_tempered=False,
        any_greedy=True,
        all_greedy=False,
    )
    tokens, _ = sample(logits, mixed, torch.tensor([0.0, 0.0]).double())
    assert tokens.tolist() == [1, 0]


@given(
    st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=8).filter(any), st.floats(0, 1, exclude_max=True)
)
def test_a_token_of_probability_zero_is_never_drawn(weights: list[float], uniform: float) -> None:
    token = draw(torch.tensor([weights]), torch.tensor([uniform], dtype=torch.float64))
    assert weights[int(token)] > 0


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 10**6))
def test_uniforms_depend_on_seed_and_step_alone(seed: int, step: int) -> None:
    spread = spread_seed(seed)
    alone = uniforms(np.array([spread], dtype=np.uint64), np.array([step]))
    among_others = uniforms(np.array([1, spread, 7], dtype=np.uint64), np.array([3, step, 5]))
    assert alone[0] == among_others[1]
    assert 0.0 <= alone[0] < 1.0


def test_uniforms_are_uniform_over_steps_and_over_neighbouring_seeds() -> None:
    steps = np.arange(20_000)
    over_steps = uniforms(np.full(20_000, spread_seed(1), dtype=np.uint64), steps)
    over_seeds = uniforms(
        np.array([spread_seed(seed) for seed in range(20_000)], dtype=np.uint64), np.zeros(20_000, int)
    )
    for values in (over_steps, over_seeds):
        shares = np.histogram(values, bins=20, range=(0, 1))[0] / 20_000
        assert np.abs(shares - 0.05).max() < 0.008
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


def test_penalties_change_logits_by_their_definitions() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5])
    counts, seen = torch.tensor([2, 0, 1, 0]), torch.tensor([True, True, True, False])
    penalized = penalize(logits, counts, seen, frequency=0.5, presence=0.25, repetition=1.0)
    assert penalized.tolist() == pytest.approx([2 - 1.0 - 0.25, -2.0, 1 - 0.5 - 0.25, 0.5])
    repeated = penalize(logits, counts, seen, frequency=0.0, presence=0.0, repetition=2.0)
    assert repeated.tolist() == pytest.approx([1.0, -4.0, 0.5, 0.5])
