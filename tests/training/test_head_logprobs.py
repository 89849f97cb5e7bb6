"""Logits a chunk at a time: the values and gradients of all at once, and one gradient as large as the layer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from slime_core.training.head_logprobs import head_logprobs
from slime_core.training.logit_scaling import LogitScaling

REPOSITORY = Path(__file__).parents[2]
SCALINGS = [LogitScaling(), LogitScaling(multiplier=0.3), LogitScaling(divisor=3.0, softcap=0.4)]


def naive(hidden, head, targets, temperature, scaling):
    z = head(hidden) * scaling.multiplier / scaling.divisor
    z = z if scaling.softcap is None else scaling.softcap * torch.tanh(z / scaling.softcap)
    log_p = torch.log_softmax(z / temperature, -1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("use", [(1.0, 0.0), (0.0, 1.0), (1.0, -0.7)])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("bias", [False, True])
def test_chunks_give_the_values_and_gradients_of_a_naive_layer(use, scaling, bias):
    torch.manual_seed(0)
    hidden, head = torch.randn(10, 6, requires_grad=True), nn.Linear(6, 11, bias=bias)
    targets, pull = torch.randint(0, 11, (10,)), torch.randn(10)
    results = []
    for limit in (None, 10**6, 33):  # naive, at once, three rows at a time
        if limit is None:
            found = naive(hidden, head, targets, 0.7, scaling)
        else:
            found = head_logprobs(hidden, head, targets, 0.7, vocab_size=11, scaling=scaling, max_logits=limit)
        total = sum((pull * weight * value).sum() for weight, value in zip(use, found, strict=True) if weight)
        results.append((*found, *torch.autograd.grad(total, [hidden, *head.parameters()])))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


def test_a_frozen_layer_passes_the_gradient_on():
    torch.manual_seed(0)
    hidden, head, targets = torch.randn(10, 6, requires_grad=True), nn.Linear(6, 11), torch.randint(0, 11, (10,))
    head.requires_grad_(False)
    grads = []
    for limit in (10**6, 33):
        logprobs, _ = head_logprobs(hidden, head, targets, 1.0, vocab_size=11, max_logits=limit)
        grads += torch.autograd.grad(logprobs.sum(), hidden)
    torch.testing.assert_close(*grads)


def test_a_layer_that_is_more_than_linear_is_cut_too():
    torch.manual_seed(0)
    hidden, targets = torch.randn(10, 6, requires_grad=True), torch.randint(0, 11, (10,))
    head = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 11))
    results = []
    for limit in (10**6, 33):
        logprobs, entropy = head_logprobs(hidden, head, targets, 1.0, vocab_size=11, max_logits=limit)
        results.append(torch.autograd.grad((logprobs + 0.5 * entropy).sum(), [hidden, *head.parameters()]))
    torch.testing.assert_close(*results)


def test_chunks_in_bfloat16_are_near_those_at_once():
    torch.manual_seed(0)
    hidden, head = torch.randn(10, 6).bfloat16().requires_grad_(), nn.Linear(6, 11).bfloat16()
    targets = torch.randint(0, 11, (10,))
    results = []
    for limit in (10**6, 33):
        logprobs, _ = head_logprobs(hidden, head, targets, 1.0, vocab_size=11, max_logits=limit)
        assert logprobs.dtype == torch.float32
        results.append(torch.autograd.grad(logprobs.sum(), [hidden, *head.parameters()]))
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


def test_the_peak_has_one_gradient_of_the_layer_and_no_more():
    sizes = ["--tokens", "512", "--vocab", "20000", "--hidden", "2048", "--max-logits", "1000000"]
    command = [sys.executable, "-m", "benchmarks.loss_memory", *sizes, "--measure"]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    weight_gb = 20000 * 2048 * 4e-9
    states_gb = 512 * 2048 * 4e-9
    assert weight_gb < result["peak_gb"] < 2.0 * weight_gb + states_gb
