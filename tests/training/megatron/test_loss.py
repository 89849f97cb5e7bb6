"""Log-probabilities over a cut vocabulary, against the plain ones; and the traps of Megatron's own loss."""

from __future__ import annotations

import torch
from torch.testing import assert_close

from training.megatron.cases import LOGIT_ROWS, VOCAB


def plain(temperature):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(LOGIT_ROWS, VOCAB, generator=generator, dtype=torch.float64).mul(5).requires_grad_()
    targets = torch.randint(0, VOCAB, (LOGIT_ROWS,), generator=generator)
    log_p = torch.log_softmax(logits / temperature, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    chosen = log_p.gather(-1, targets[:, None])[:, 0]
    weights = torch.linspace(-1, 2, LOGIT_ROWS, dtype=torch.float64)
    (chosen * weights + entropy * weights.flip(0)).sum().backward()
    return chosen, entropy, logits.grad


def test_values_and_gradients_are_those_of_the_whole_vocabulary(two_ranks):
    chosen, entropy, gradient = plain(temperature=0.7)
    halves = []
    for rank in range(2):
        found = two_ranks.found("vocab_loss", rank)
        assert_close(torch.tensor(found["logprobs"]), chosen.float().detach(), rtol=1e-5, atol=1e-5)
        assert_close(torch.tensor(found["entropy"]), entropy.float().detach(), rtol=1e-5, atol=1e-5)
        halves.append(torch.tensor(found["gradient"]))
    whole = torch.cat(halves, 1)
    assert_close(whole[:, :VOCAB], gradient.float(), rtol=1e-4, atol=1e-5)
    assert whole[:, VOCAB:].eq(0).all(), "the padding gets no gradient"


def test_the_logits_are_left_as_they_were(two_ranks):
    # Megatron's own cross entropy writes into them
    assert two_ranks.found("vocab_loss", 0)["unchanged"]
    assert two_ranks.found("vocab_loss", 1)["unchanged"]
