"""Fused log-probabilities and entropy against autograd over log_softmax, and their chunks."""

from __future__ import annotations

import pytest
import torch

from slime_core.training.logprobs import token_logprobs


def reference(logits: torch.Tensor, targets: torch.Tensor, temperature: float):
    log_p = torch.log_softmax(logits / temperature, -1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("use", [(1.0, 0.0), (0.0, 1.0), (1.0, -0.7)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradients_of_both_outputs(use, temperature):
    torch.manual_seed(0)
    logits = torch.randn(7, 11, dtype=torch.float32, requires_grad=True)
    targets, pull = torch.randint(0, 11, (7,)), torch.randn(7)
    grads = []
    for function in (token_logprobs, reference):
        logprobs, entropy = function(logits, targets, temperature)
        parts = [pull * weight * value for weight, value in zip(use, (logprobs, entropy), strict=True) if weight]
        grads.append(torch.autograd.grad(sum(parts).sum(), logits)[0])
    torch.testing.assert_close(*grads)


def test_half_precision_logits_are_computed_in_float32():
    torch.manual_seed(0)
    logits, targets = torch.randn(5, 300).bfloat16(), torch.randint(0, 300, (5,))
    got = token_logprobs(logits, targets, 1.0)
    assert got[0].dtype == got[1].dtype == torch.float32
    torch.testing.assert_close(got, reference(logits.float(), targets, 1.0))
