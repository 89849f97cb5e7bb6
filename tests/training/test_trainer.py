"""A round of training against a naive one: one sequence at a time, plain Python loops, torch's own optimiser."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slime_core.errors import PluginError, SlimeError
from slime_core.tracking.flops import ModelFlops
from slime_core.types import Sample, Shard, TrainBatch


def weights_of(trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights("float32")}


def plain_logprobs(model, sample: Sample) -> list[torch.Tensor]:
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))
    log_p = torch.log_softmax(model(tokens[None]).logits[0], -1)
    return [log_p[place - 1, tokens[place]] for place in range(sample.prompt_length, len(tokens))]


def group_advantages(made: list[Sample]) -> list[float]:
    out = []
    for sample in made:
        peers = [s.reward for s in made if s.group_index == sample.group_index]
        out.append((sample.reward - statistics.fmean(peers)) / (statistics.stdev(peers) + 1e-6))
    return out


def naive_step(model, optimizer, made, advantages, old, aggregation) -> dict[str, float]:
    """One PPO step; `old` holds the old log-probabilities of each sample, None for the model's own now."""
    sequences, clipped, count = [], 0, 0
    for number, sample in enumerate(made):
        losses = []
        for place, lp in enumerate(plain_logprobs(model, sample)):
            if not sample.loss_mask[place]:
                continue
            before = lp.item() if old is None else old[number][place]
            ratio, a = torch.exp(lp - before), advantages[number]
            bounded = ratio.clamp(0.8, 1.2)
            losses.append(-torch.minimum(a * ratio, a * bounded))
            clipped += (a * bounded < a * ratio).item()
            count += 1
        sequences.append(losses)
    if aggregation == "token":
        loss = sum(sum(losses) for losses in sequences) / count
    else:
        loss = sum(sum(losses) / len(losses) for losses in sequences) / len(sequences)
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {"loss": loss.item(), "grad_norm": norm.item(), "clip_fraction": clipped / count, "num_tokens": count}


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_a_grpo_round_is_the_naive_one(aggregation, make_trainer, model_dir, samples, shard_of, tmp_path):
    made = samples(12)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    expected = naive_step(model, optimizer, made, group_advantages(made), None, aggregation)
    trainer = make_trainer("--loss-aggregation", aggregation)
    metrics = trainer.train(0, shard_of(made))
    for name, value in expected.items():
        assert metrics[f"train/{name}"] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert metrics["train/lr"] == 1e-3
    assert metrics["train/skipped_steps"] == 0
    # Adam's first step is lr * sign(gradient): weights whose gradient is rounding noise may differ by it
    close = [
        torch.isclose(value, model.state_dict()[name], atol=1e-5, rtol=0).float().mean()
        for name, value in weights_of(trainer).items()
    ]
    assert min(close) > 0.99


@pytest.mark.parametrize("source", ["recomputed", "rollout"])
def test_several_steps_are_the_naive_ones(source, make_trainer, model_dir, samples, shard_of):
    made = samples(16)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    old = [[lp.item() for lp in plain_logprobs(model, s)] if source == "recomputed" else s.logprobs for s in made]
    advantages = group_advantages(made)
    ends = [6, 10, 16]
    parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    expected = [naive_step(model, optimizer, made[p], advantages[p], old[p], "token") for p in parts]
    flags = ["--use-rollout-logprobs"] if source == "rollout" else []
    trainer = make_trainer("--lr", "1e-2", "--num-steps-per-rollout", "3", *flags)
    metrics = trainer.train(0, shard_of(made, step_ends=ends))
    assert metrics["train/loss"] == pytest.approx(statistics.fmean(e["loss"] for e in expected), rel=1e-3)
    assert metrics["train/grad_norm"] == pytest.approx(statistics.fmean(e["grad_norm"] for e in expected), rel=1e-3)
    count = sum(e["num_tokens"] for e in expected)
    clipped = sum(e["clip_fraction"] * e["num_tokens"] for e in expected)
    assert metrics["train/clip_fraction"] == pytest.approx(clipped / count, abs=1.5 / count)
    assert metrics["train/num_tokens"] == count


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_the_micro_batch_budget_changes_nothing(aggregation, make_trainer, samples, shard_of, tmp_path):
    made = samples(24, longest=20)
    results = []
    for budget in (1, 25, 60, 8192):
        trainer = make_trainer("--loss-aggregation", aggregation, "--max-tokens-per-gpu", str(budget), "--lr", "0")
        metrics = trainer.train(0, shard_of(made))
        results.append({name: value for name, value in metrics.items() if name.startswith("train/")})
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-4, abs=1e-5)


def test_the_order_of_samples_changes_nothing(make_trainer, samples, shard_of):
    made = samples(12)
    trainer = make_trainer("--lr", "0")
    one, other = (trainer.train(0, shard_of(order)) for order in (made, made[::-1]))
    for name in ("train/loss", "train/grad_norm", "train/entropy", "train/logprob_abs_diff"):
        assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("steps", [[12], [4, 12]])
def test_logprob_difference_is_that_of_the_first_policy(steps, make_trainer, model_dir, samples, shard_of):
    made = samples(12)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    off = [
        abs(lp.item() - engine)
        for sample in made
        for lp, engine, mask in zip(plain_logprobs(model, sample), sample.logprobs, sample.loss_mask, strict=True)
        if mask
    ]
    metrics = make_trainer("--lr", "1e-2").train(0, shard_of(made, step_ends=steps))
    assert metrics["train/logprob_abs_diff"] == pytest.approx(statistics.fmean(off), rel=1e-4)
    assert metrics["train/logprob_abs_diff_max"] == pytest.approx(max(off), rel=1e-4)


def test_under_rollout_logprobs_the_difference_is_measured_in_the_first_step(make_trainer, samples, shard_of):
    made = samples(12)
    flags = ("--use-rollout-logprobs", "--lr", "1e-2")
    several = make_trainer(*flags).train(0, shard_of(made, step_ends=[4, 12]))
    first_alone = make_trainer(*flags).train(0, shard_of(made[:4]))
    for name in ("train/logprob_abs_diff", "train/logprob_abs_diff_max"):
        assert several[name] == pytest.approx(first_alone[name], rel=1e-5)


def test_a_round_without_trained_tokens_updates_nothing(make_trainer, samples, shard_of, tmp_path):
    made = samples(4)
    for sample in made:
        sample.loss_mask[:] = 0
    trainer = make_trainer("--weight-decay", "0.5")
    before = weights_of(trainer)
    metrics = trainer.train(0, shard_of(made))
    after = weights_of(trainer)
    assert metrics["train/skipped_steps"] == 1
    assert metrics["train/loss"] == metrics["train/grad_norm"] == metrics["train/num_tokens"] == 0
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_empty_step_is_counted_and_the_others_train(make_trainer, samples, shard_of):
    metrics = make_trainer().train(0, shard_of(samples(8), step_ends=[4, 4, 8]))
    assert metrics["train/skipped_steps"] == 1
    assert metrics["train/grad_norm"] > 0


def test_a_gradient_that_is_not_finite_skips_the_step(make_trainer, samples, shard_of, tmp_path):
    made = samples(4)
    made[0].reward = 1e300
    trainer = make_trainer("--no-grpo-std-normalization", "--runs-dir", str(tmp_path), "--run-name", "run")
    before = weights_of(trainer)
    metrics = trainer.train(0, shard_of(made))
    after = weights_of(trainer)
    assert metrics["train/skipped_steps"] == metrics["train/nonfinite_steps"] == 1
    assert all(torch.equal(before[name], after[name]) for name in before)
    made[0].reward = 1.0
    assert trainer.train(1, shard_of(made))["train/skipped_steps"] == 0


def test_the_batch_of_a_skipped_step_is_kept_a_few_times(make_trainer, samples, shard_of, tmp_path):
    made = samples(8)
    made[5].reward = 1e300
    trainer = make_trainer("--no-grpo-std-normalization", "--runs-dir", str(tmp_path), "--run-name", "run")
    for step in range(6):
        trainer.train(step, shard_of(made, step_ends=[4, 8]))
    kept = sorted((tmp_path / "run" / "skipped_steps").iterdir())
    assert [path.name for path in kept] == [f"round_{step:06d}_step_1_rank0.pt" for step in range(4)]
    batch = torch.load(kept[0], weights_only=True)
    assert batch["tokens"].tolist() == [token for sample in made[4:] for token in sample.tokens.tolist()]
    assert batch["advantages"].isinf().any()
    assert len(batch["advantages"]) == len(batch["old_logprobs"]) == sum(s.response_length for s in made[4:])


def test_a_sample_without_reward_does_not_move_the_policy(make_trainer, samples, shard_of):
    made = samples(4)
    for sample in made[:3]:
        sample.reward = 1.0
    made[3].reward = None
    metrics = make_trainer().train(0, shard_of(made))
    assert metrics["train/grad_norm"] == 0


def test_engine_logprobs_may_be_missing_only_where_nothing_is_trained(make_trainer, samples, shard_of):
    made = samples(4)
    trainer = make_trainer("--use-rollout-logprobs")
    assert math.isfinite(trainer.train(0, shard_of(made))["train/grad_norm"])
    made[2].logprobs[-1] = np.nan
    with pytest.raises(SlimeError, match="1 trained tokens have no log-probability"):
        trainer.train(1, shard_of(made))


def test_demonstrations_need_no_rewards_but_ppo_clip_does(make_trainer, samples, shard_of, model_dir):
    made = samples(4)
    for sample in made:
        sample.reward = None
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    nll = [
        -lp.item()
        for sample in made
        for lp, mask in zip(plain_logprobs(model, sample), sample.loss_mask, strict=True)
        if mask
    ]
    metrics = make_trainer("--policy-loss", "sft").train(0, shard_of(made))
    assert metrics["train/loss"] == pytest.approx(statistics.fmean(nll), rel=1e-4)
    with pytest.raises(SlimeError, match="--reward"):
        make_trainer().train(0, shard_of(made))


LOSS_WITH_EXTRAS = """
from slime_core import hookimpl

@hookimpl
def policy_loss(batch, logprobs, entropy):
    scale = batch.expand(batch["scale"])
    noted = batch.expand(batch.rewards.new_tensor([m["note"] for m in batch.metadata]))
    return -logprobs * scale * batch["weight"], {"scale": scale, "note": noted}
"""


def test_extra_keys_and_metadata_reach_the_loss(make_trainer, samples, model_dir, tmp_path):
    plugin = tmp_path / "scaled.py"
    plugin.write_text(LOSS_WITH_EXTRAS)
    made = samples(4)
    for number, sample in enumerate(made):
        sample.train_metadata = {"note": number}
    batch = TrainBatch.from_samples(made)
    batch.per_sample = {"scale": np.array([1.0, 2.0, 3.0, 4.0], np.float32)}
    batch.per_token = {"weight": np.linspace(0, 1, len(batch.loss_mask), dtype=np.float32)}
    shard = Shard(batch, [4], batch.rewards, batch.group_index)
    metrics = make_trainer("--policy-loss", str(plugin), "--max-tokens-per-gpu", "20").train(0, shard)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    place, losses, notes = 0, [], []
    for number, sample in enumerate(made):
        for lp, mask in zip(plain_logprobs(model, sample), sample.loss_mask, strict=True):
            if mask:
                losses.append(-lp.item() * (number + 1) * batch.per_token["weight"][place])
                notes.append(number)
            place += 1
    assert metrics["train/loss"] == pytest.approx(statistics.fmean(losses), rel=1e-4)
    assert metrics["train/note"] == pytest.approx(statistics.fmean(notes))
    assert metrics["train/scale"] == pytest.approx(statistics.fmean(notes) + 1)


def test_a_loss_of_the_wrong_shape_names_its_plugin(make_trainer, samples, shard_of, tmp_path):
    plugin = tmp_path / "summed.py"
    plugin.write_text(
        "from slime_core import hookimpl\n\n@hookimpl\ndef policy_loss(logprobs):\n    return -logprobs.sum(), {}\n"
    )
    with pytest.raises(PluginError, match=r"plugin 'summed' .* gave a loss of shape \(\)"):
        make_trainer("--policy-loss", str(plugin)).train(0, shard_of(samples(4)))


@pytest.mark.parametrize(
    ("returned", "message"),
    [("-logprobs", r"must return \(loss, metrics\)"), ("(-logprobs, {'x': 1.0})", "gave x of shape float")],
)
def test_a_loss_that_breaks_the_contract_names_its_plugin(returned, message, make_trainer, samples, shard_of, tmp_path):
    plugin = tmp_path / "odd.py"
    plugin.write_text(
        f"from slime_core import hookimpl\n\n@hookimpl\ndef policy_loss(logprobs):\n    return {returned}\n"
    )
    with pytest.raises(PluginError, match=message):
        make_trainer("--policy-loss", str(plugin)).train(0, shard_of(samples(4)))


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "stateless_adam"])
def test_bfloat16_weights_train(optimizer, make_trainer, samples, shard_of):
    made = samples(8)
    for sample in made:
        sample.reward = None
    trainer = make_trainer("--dtype", "bfloat16", "--policy-loss", "sft", "--optimizer", optimizer, "--lr", "1e-2")
    losses = [trainer.train(step, shard_of(made))["train/loss"] for step in range(8)]
    assert losses[-1] < 0.8 * losses[0]


def test_the_speed_of_the_passes_is_told(make_trainer, samples, shard_of, model_dir):
    made = samples(8)
    metrics = make_trainer("--num-trainers", "2").train(0, shard_of(made))
    lengths = np.array([len(sample.tokens) for sample in made])
    operations = ModelFlops.of(str(model_dir)).of_sequences(lengths).sum()
    a_device = operations / metrics["perf/train_forward_backward_s"] / 2
    assert metrics["perf/train_tflops"] == pytest.approx(a_device / 1e12)


def test_training_learns(make_trainer, samples, shard_of):
    made = samples(8)
    for sample in made:
        sample.reward = None
    trainer = make_trainer("--policy-loss", "sft", "--optimizer", "muon", "--lr", "1e-2")
    losses = [trainer.train(step, shard_of(made))["train/loss"] for step in range(12)]
    assert losses[-1] < 0.5 * losses[0]


OVERLAP = ["--kl-loss-coef", "0.1", "--num-steps-per-rollout", "2"]


def with_early(shard: Shard, answer: dict, keep, offset: float = 0.0) -> Shard:
    """The shard as the rollout side fills it in: NaN at the samples that `keep` does not name."""
    known = np.repeat(np.isin(answer["sample_index"], keep), answer["response_lengths"])
    keys = {name: np.where(known, answer[name] + offset, np.nan).astype(np.float32)
            for name in ("old_logprobs", "ref_logprobs")}  # fmt: skip
    return replace(shard, batch=replace(shard.batch, per_token=keys))


@pytest.mark.parametrize("keep", [range(12), range(0, 12, 3), ()])
def test_what_was_computed_early_changes_nothing(keep, make_trainer, other_model, samples, shard_of):
    made = samples(12)
    shard = shard_of(made, step_ends=[6, 12])
    flags = [*OVERLAP, "--ref-model", str(other_model)]
    plain = make_trainer(*flags).train(0, shard)
    trainer = make_trainer(*flags, "--overlap-logprobs")
    early = trainer.train(0, with_early(shard, trainer.early_logprobs(shard), list(keep)))
    for name, value in plain.items():
        if name.startswith("train/"):
            assert early[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_what_was_computed_early_is_what_is_used(make_trainer, other_model, samples, shard_of):
    shard = shard_of(samples(12), step_ends=[6, 12])
    flags = [*OVERLAP, "--ref-model", str(other_model), "--lr", "0"]
    plain = make_trainer(*flags).train(0, shard)
    trainer = make_trainer(*flags)
    moved = trainer.train(0, with_early(shard, trainer.early_logprobs(shard), list(range(12)), offset=0.05))
    assert plain["train/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert moved["train/ppo_kl"] == pytest.approx(0.05, rel=1e-3)
    assert moved["train/ref_kl"] != pytest.approx(plain["train/ref_kl"], rel=1e-3)
