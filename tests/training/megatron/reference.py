"""Training that knows nothing of Megatron: transformers, one sequence at a time, and torch's AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from slime_core.types import Sample

LR, EPS, WEIGHT_DECAY = 1e-3, 1e-4, 0.5
FLAGS = ["--policy-loss", "sft", "--lr", "1e-3", "--adam-eps", "1e-4", "--weight-decay", "0.5"]
"""The same for a trainer; the weight decay is large, so that decayed norms would show."""


@dataclass
class Trained:
    """What came out."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]
    prompt: list[float]


def train(model_dir: Path, rounds: Sequence[list[Sample]], prompt: list[int]) -> Trained:
    """One step a round on the mean negative log-likelihood of the trained tokens."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, eps=EPS)
    losses, norms = [], []
    for samples in rounds:
        terms = [
            -lp
            for sample in samples
            for lp, mask in zip(response_logprobs(model, sample), sample.loss_mask, strict=True)
            if mask
        ]
        loss = torch.stack(terms).mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return Trained(losses, norms, weights, prompt_logprobs(model, prompt))


def response_logprobs(model: torch.nn.Module, sample: Sample) -> list[torch.Tensor]:
    """Of every response token."""
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))
    log_p = torch.log_softmax(model(tokens[None]).logits[0], -1)
    return [log_p[place - 1, tokens[place]] for place in range(sample.prompt_length, len(tokens))]


@torch.no_grad()
def prompt_logprobs(model: torch.nn.Module, tokens: list[int]) -> list[float]:
    """Of every token but the first."""
    ids = torch.tensor(tokens)
    log_p = torch.log_softmax(model(ids[None]).logits[0], -1)
    return log_p[:-1].gather(1, ids[1:, None])[:, 0].tolist()
