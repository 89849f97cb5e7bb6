"""A model whose answers have a long tail: about 100 tokens in the mean, many times that at most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHORT_ENDING, LONG_ENDING, LONG_FRACTION = 1 / 50, 1 / 400, 0.15
"""Chance of ending at each token of a short and of a long answer, and how many are long: 98 tokens in the mean."""


def make_long_tail_model(source: Path, directory: Path) -> None:
    """The quickstart's architecture with weights that make every next token depend on the present one alone.

    Attention and MLPs are computed as ever and add nothing; an embedding says which state its token stands for, and
    the output head, here not tied to it, gives each state's next-token distribution.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    config = AutoConfig.from_pretrained(source, tie_word_embeddings=False, max_position_embeddings=2048)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    special = tokenizer("<|end|><|user|><|assistant|>")["input_ids"]
    states = token_states(config.vocab_size, special)
    transitions = torch.tensor(next_token_logprobs(states, end=special[0]))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.get_input_embeddings().weight.zero_()
        model.get_input_embeddings().weight[range(config.vocab_size), states] = 1.0
        model.get_output_embeddings().weight.zero_()
        # the last norm makes a one-hot vector sqrt(hidden size) long
        model.get_output_embeddings().weight[:, : len(transitions)] = transitions.T / math.sqrt(config.hidden_size)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def token_states(vocab_size: int, special: Sequence[int]) -> list[int]:
    """State of each token: 0 in a short answer, 1 in a long one, 2 before the answer (the special tokens)."""
    return [2 if token in special else token % 2 for token in range(vocab_size)]


def next_token_logprobs(states: Sequence[int], end: int) -> list[list[float]]:
    """[3, vocabulary]: log-probability of each next token in each state; an answer never changes its state."""
    stay = {0: [1 - SHORT_ENDING, 0.0], 1: [0.0, 1 - LONG_ENDING], 2: [1 - LONG_FRACTION, LONG_FRACTION]}
    ending = [SHORT_ENDING, LONG_ENDING, 0.0]
    counts = [states.count(0), states.count(1)]
    table = []
    for state, shares in stay.items():
        chances = [shares[other] / counts[other] if other < 2 else 0.0 for other in states]
        chances[end] = ending[state]
        table.append([math.log(max(chance, 1e-12)) for chance in chances])
    return table
