"""The ppo_clip loss and its flags."""

from __future__ import annotations

import math
from argparse import Namespace

import pytest
import torch

from slime_core.defaults import ppo_clip
from slime_core.errors import OptionError, SlimeError
from slime_core.training.batch import TensorBatch
from slime_core.types import Sample, TrainBatch

NEW, OLD, ADVANTAGES = [-1.0, -0.2, -3.0, -0.9], [-1.5, -0.3, -2.0, -0.9], [1.0, 2.0, -1.0, 0.5]


def batch_of(advantages: list[float] | None) -> TensorBatch:
    sample = Sample()
    sample.append([1, 2, 3, 4])
    batch = TensorBatch.of(TrainBatch.from_samples([sample]), torch.device("cpu"))
    batch.old_logprobs = torch.tensor(OLD)
    batch.advantages = None if advantages is None else torch.tensor(advantages)
    return batch


@pytest.mark.parametrize(("high", "upper"), [(None, 1.2), (0.8, 1.8)])
def test_the_loss_is_the_clipped_surrogate(high, upper):
    args = Namespace(ppo_clip_eps=0.2, ppo_clip_eps_high=high, ppo_clip_dual=None)
    loss, metrics = ppo_clip.policy_loss(args=args, batch=batch_of(ADVANTAGES), logprobs=torch.tensor(NEW))
    for i, (new, old, a) in enumerate(zip(NEW, OLD, ADVANTAGES, strict=True)):
        ratio = math.exp(new - old)
        surrogate = min(a * ratio, a * min(max(ratio, 0.8), upper))
        assert loss[i].item() == pytest.approx(-surrogate)
        assert metrics["clip_fraction"][i].item() == (surrogate < a * ratio)
        assert metrics["ppo_kl"][i].item() == pytest.approx(old - new)


def test_dual_clip_bounds_what_a_bad_token_can_cost():
    args = Namespace(ppo_clip_eps=0.2, ppo_clip_eps_high=None, ppo_clip_dual=2.0)
    batch = batch_of([-1.0] * 4)
    loss, metrics = ppo_clip.policy_loss(
        args=args, batch=batch, logprobs=torch.tensor(OLD) + torch.tensor([0.1, 2, -1, 0.6])
    )
    assert loss.tolist() == pytest.approx([math.exp(0.1), 2.0, 0.8, math.exp(0.6)])
    assert metrics["dual_clip_fraction"].tolist() == [0, 1, 0, 0]


def test_a_round_without_rewards_says_to_name_one():
    with pytest.raises(SlimeError, match="--reward"):
        ppo_clip.policy_loss(
            args=Namespace(ppo_clip_eps=0.2, ppo_clip_eps_high=None, ppo_clip_dual=None),
            batch=batch_of(None),
            logprobs=torch.tensor(NEW),
        )


@pytest.mark.parametrize(
    ("low", "high", "flag"), [(1.5, None, "--ppo-clip-eps 1.5"), (0.2, -1.0, "--ppo-clip-eps-high")]
)
def test_a_range_that_makes_no_sense_is_refused(low, high, flag):
    with pytest.raises(OptionError, match=flag):
        ppo_clip.configure(args=Namespace(ppo_clip_eps=low, ppo_clip_eps_high=high, ppo_clip_dual=None))


def test_a_dual_bound_within_the_range_is_refused():
    with pytest.raises(OptionError, match=r"--ppo-clip-dual 1\.0 is not a number above 1"):
        ppo_clip.configure(args=Namespace(ppo_clip_eps=0.2, ppo_clip_eps_high=None, ppo_clip_dual=1.0))
