"""The gspo and cispo losses and their flags, on two samples with a masked token."""

from __future__ import annotations

import math
from argparse import Namespace

import pytest
import torch

from slime_core.defaults import cispo, gspo
from slime_core.errors import OptionError, SlimeError
from slime_core.training.batch import TensorBatch
from slime_core.types import Sample, TrainBatch

MASKS = [[1, 1, 0], [1, 1]]
NEW, OLD = [-1.0, -0.2, -3.0, -0.9, -2.0], [-1.5, -0.3, -2.0, -0.9, -1.0]
ADVANTAGES = [1.0, 1.0, 1.0, -0.5, -0.5]
GSPO = Namespace(gspo_clip_eps=0.1, gspo_clip_eps_high=0.2)
CISPO = Namespace(cispo_clip_eps=0.5, cispo_clip_eps_high=0.3)


def batch_of(advantages: list[float] | None = ADVANTAGES) -> TensorBatch:
    made = []
    for mask in MASKS:
        sample = Sample()
        for trained in mask:
            sample.append([1], logprobs=[-1.0] if trained else None, trainable=bool(trained))
        made.append(sample)
    batch = TensorBatch.of(TrainBatch.from_samples(made), torch.device("cpu"))
    batch.old_logprobs = torch.tensor(OLD)
    batch.advantages = None if advantages is None else torch.tensor(advantages)
    return batch


def test_gspo_clips_whole_sequences():
    new = torch.tensor(NEW, requires_grad=True)
    loss, metrics = gspo.policy_loss(args=GSPO, batch=batch_of(), logprobs=new)
    # masked tokens count in no mean: s = exp((0.5 + 0.1) / 2), clipped at 1.2, and exp((0 - 1) / 2), clipped at 0.9
    assert loss.tolist() == pytest.approx([-1.2] * 3 + [0.5 * 0.9] * 2)
    assert metrics["clip_fraction"].tolist() == [1.0] * 5
    loss.sum().backward()
    assert new.grad.tolist() == [0.0] * 5


def test_gspo_in_range_moves_every_token_by_its_sequences_ratio():
    new = torch.tensor(NEW, requires_grad=True)
    args = Namespace(gspo_clip_eps=0.9, gspo_clip_eps_high=0.9)
    loss, metrics = gspo.policy_loss(args=args, batch=batch_of(), logprobs=new)
    loss.sum().backward()
    first, second = math.exp(0.3), math.exp(-0.5)
    assert new.grad.tolist() == pytest.approx([-first] * 3 + [0.5 * second] * 2)
    assert metrics["ppo_kl"].tolist() == pytest.approx([o - n for n, o in zip(NEW, OLD, strict=True)])


def test_cispo_clips_weights_and_keeps_gradients():
    new = torch.tensor(NEW, requires_grad=True)
    loss, metrics = cispo.policy_loss(args=CISPO, batch=batch_of(), logprobs=new)
    loss.sum().backward()
    weights = [1.3, math.exp(0.1), 0.5, 1.0, 0.5]
    for i, (weight, a, lp) in enumerate(zip(weights, ADVANTAGES, NEW, strict=True)):
        assert loss[i].item() == pytest.approx(-weight * a * lp)
        assert new.grad[i].item() == pytest.approx(-weight * a)
    assert metrics["clip_fraction"].tolist() == [1, 0, 1, 0, 1]


@pytest.mark.parametrize(("plugin", "args"), [(gspo, GSPO), (cispo, CISPO)])
def test_a_round_without_advantages_says_what_to_name(plugin, args):
    with pytest.raises(SlimeError, match="--reward"):
        plugin.policy_loss(args=args, batch=batch_of(None), logprobs=torch.tensor(NEW))


@pytest.mark.parametrize("name", ["gspo", "cispo"])
@pytest.mark.parametrize(("low", "high", "flag"), [(1.5, 0.2, "clip-eps 1.5"), (0.2, -1.0, "clip-eps-high -1.0")])
def test_a_range_that_makes_no_sense_is_refused(name, low, high, flag):
    args = Namespace(**{f"{name}_clip_eps": low, f"{name}_clip_eps_high": high})
    with pytest.raises(OptionError, match=f"--{name}-{flag}"):
        {"gspo": gspo, "cispo": cispo}[name].configure(args=args)
