"""PPO with a critic against a naive one: a body and a linear head, one sequence at a time."""

from __future__ import annotations

from argparse import Namespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slime_core.defaults import ppo
from slime_core.engines.checksum import model_checksums
from slime_core.errors import CheckpointError, OptionError, SlimeError
from slime_core.training.batch import TensorBatch
from slime_core.types import Sample, TrainBatch

FLAGS = ("--advantage-estimator", "ppo", "--critic", "--critic-lr", "1e-3", "--adam-eps", "1e-4")


class NaiveCritic(torch.nn.Module):
    def __init__(self, directory):
        super().__init__()
        self.body = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().base_model
        self.head = torch.nn.Linear(32, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def values(self, sample):
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))
        values = self.head(self.body(tokens[None])[0][0])[:, 0]
        return [values[place - 1] for place in range(sample.prompt_length, len(tokens))]


def naive_gae(sample, values, gamma, lam):
    trained = [t for t in range(len(values)) if sample.loss_mask[t]]
    found, running = {}, 0.0
    for i in reversed(range(len(trained))):
        last = i + 1 == len(trained)
        following = 0.0 if last else values[trained[i + 1]]
        delta = (sample.reward if last else 0.0) + gamma * following - values[trained[i]]
        running = delta + gamma * lam * running
        found[trained[i]] = (running, running + values[trained[i]])
    return found


def naive_round(critic, optimizer, made, gamma, lam, clip):
    """One step of the critic; its loss and the mean advantage, as they were before it."""
    old = [[v.item() for v in critic.values(sample)] for sample in made]
    targets = [naive_gae(sample, values, gamma, lam) for sample, values in zip(made, old, strict=True)]
    terms = []
    for sample, before, target in zip(made, old, targets, strict=True):
        now = critic.values(sample)
        for t, (_, goal) in target.items():
            bounded = before[t] + (now[t] - before[t]).clamp(-clip, clip)
            terms.append(torch.maximum((now[t] - goal) ** 2, (bounded - goal) ** 2))
    loss = sum(terms) / len(terms)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
    optimizer.step()
    advantages = [a for target in targets for a, _ in target.values()]
    return loss.item(), sum(advantages) / len(advantages)


@pytest.mark.parametrize("budget", ["1", "8192"])
def test_rounds_of_ppo_are_the_naive_ones(budget, make_trainer, samples, shard_of, model_dir):
    critic = NaiveCritic(model_dir)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.0)
    trainer = make_trainer(*FLAGS, "--ppo-gamma", "0.9", "--ppo-lambda", "0.8", "--max-tokens-per-gpu", budget)
    for step in range(3):
        made = samples(8, seed=step)
        loss, advantage = naive_round(critic, optimizer, made, 0.9, 0.8, 0.2)
        got = trainer.train(step, shard_of(made))
        assert got["train/value_loss"] == pytest.approx(loss, rel=1e-3)
        assert got["train/advantage_mean"] == pytest.approx(advantage, rel=1e-3, abs=1e-4)
        assert got["train/grad_norm"] > 0


def test_the_critic_learns_the_returns(make_trainer, samples, shard_of):
    made = samples(8)
    trainer = make_trainer(*FLAGS, "--lr", "0", "--value-clip", "10", "--critic-lr", "1e-2")
    losses = [trainer.train(step, shard_of(made))["train/value_loss"] for step in range(25)]
    assert losses[-1] < 0.3 * losses[0]


def test_the_first_rounds_may_be_the_critics_alone(make_trainer, samples, shard_of):
    trainer = make_trainer(*FLAGS, "--critic-only-rounds", "1", "--lr", "1e-2")
    before = model_checksums(trainer.weights("float32"))
    assert "train/value_loss" in trainer.train(0, shard_of(samples(8)))
    assert model_checksums(trainer.weights("float32")) == before
    trainer.train(1, shard_of(samples(8)))
    assert model_checksums(trainer.weights("float32")) != before


def test_the_critic_keeps_its_own_rate_beside_muon(make_trainer):
    critic = make_trainer(*FLAGS, "--optimizer", "muon", "--muon-lr", "0.05").critic
    assert {group["peak_lr"] for part in critic.optimizer._parts for group in part.param_groups} == {1e-3}


def test_a_gradient_of_the_critic_that_is_not_finite_is_told_and_its_batch_kept(
    make_trainer, samples, shard_of, tmp_path
):
    made = samples(4)
    made[0].reward = 1e300
    trainer = make_trainer(*FLAGS, "--critic-only-rounds", "1", "--runs-dir", str(tmp_path), "--run-name", "run")
    metrics = trainer.train(0, shard_of(made))
    assert metrics["train/nonfinite_steps"] == metrics["train/skipped_steps"] == 1
    assert metrics["train/critic_grad_norm"] == 0
    kept = [path.name for path in (tmp_path / "run" / "skipped_steps").iterdir()]
    assert kept == ["round_000000_critic_step_0_rank0.pt"]
    assert trainer.train(0, shard_of(samples(4)))["train/critic_grad_norm"] > 0


def test_a_resumed_run_has_the_same_critic(make_trainer, samples, shard_of, tmp_path):
    unbroken = make_trainer(*FLAGS)
    unbroken.train(0, shard_of(samples(8)))
    unbroken.save(tmp_path)
    resumed = make_trainer(*FLAGS)
    resumed.load(tmp_path)
    for step in (1, 2):
        left, right = (t.train(step, shard_of(samples(8, seed=step))) for t in (unbroken, resumed))
        kept = [name for name in left if name.startswith("train/")]
        assert {name: left[name] for name in kept} == {name: right[name] for name in kept}


def test_a_checkpoint_without_a_critic_is_refused(make_trainer, tmp_path):
    make_trainer().save(tmp_path)
    with pytest.raises(CheckpointError, match="critic/weights"):
        make_trainer(*FLAGS).load(tmp_path)


def test_a_sample_without_a_reward_teaches_neither(make_trainer, samples, shard_of):
    made, others = samples(8), samples(8)
    for sample in others[4:]:
        sample.reward = None
    whole = make_trainer(*FLAGS).train(0, shard_of(others))
    part = make_trainer(*FLAGS).train(0, shard_of(made[:4]))
    assert whole["train/value_loss"] == pytest.approx(part["train/value_loss"], rel=1e-5)


def test_ppo_without_a_critic_says_so():
    sample = Sample(reward=1.0)
    sample.append([1, 2])
    batch = TensorBatch.of(TrainBatch.from_samples([sample]), torch.device("cpu"))
    with pytest.raises(SlimeError, match="add --critic"):
        ppo.estimate_advantages(args=Namespace(ppo_gamma=1.0, ppo_lambda=1.0), batch=batch)


def test_a_lambda_that_makes_no_sense_is_refused():
    with pytest.raises(OptionError, match=r"--ppo-lambda 1\.5"):
        ppo.configure(args=Namespace(critic=True, ppo_gamma=1.0, ppo_lambda=1.5))


def test_ppo_without_critic_is_refused_before_anything_starts(make_trainer):
    with pytest.raises(OptionError, match="add --critic"):
        make_trainer("--advantage-estimator", "ppo")
