"""Whole rounds under the core's own terms against naive ones: one sequence at a time, every token by its formula."""

from __future__ import annotations

import math
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slime_core.errors import OptionError, SlimeError
from slime_core.options import parse
from slime_core.types import Status


@pytest.fixture
def near_samples(samples, model_dir):
    """Samples whose engine was a little off the trainer: uneven rewards, masked tokens."""

    def make(num, **options):
        made = samples(num, **options)
        rng = np.random.default_rng(7)
        for sample in made:
            logprobs, _ = distributions(model_dir, sample)
            engine = logprobs.detach().numpy() + rng.normal(0, 0.5, len(logprobs))
            sample.logprobs = np.where(np.isnan(sample.logprobs), np.nan, engine).astype(np.float32)
        return made

    return make


def distributions(directory, sample):
    """Log-probabilities and entropies [response] of a sample under a saved model, with gradient."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return by_model(model, sample)


def by_model(model, sample):
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))
    log_p = torch.log_softmax(model(tokens[None]).logits[0], -1)
    places = range(sample.prompt_length, len(tokens))
    chosen = torch.stack([log_p[place - 1, tokens[place]] for place in places])
    return chosen, torch.stack([-(log_p[place - 1].exp() * log_p[place - 1]).sum() for place in places])


def rewards_above_mean(made):
    out = []
    for sample in made:
        peers = [s.reward for s in made if s.group_index == sample.group_index]
        out.append(sample.reward - statistics.fmean(peers))
    return out


def naive_gradient_norm(model_dir, made, token_loss, aggregation="token", constant=None):
    """Loss and gradient norm of a round; token_loss(sample number, token, logprob, entropy) is a token's loss."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    sequences = []
    for number, sample in enumerate(made):
        logprobs, entropies = by_model(model, sample)
        trained = [t for t in range(len(logprobs)) if sample.loss_mask[t]]
        sequences.append([token_loss(number, t, logprobs[t], entropies[t]) for t in trained])
    if aggregation == "token":
        loss = sum(sum(s) for s in sequences) / sum(map(len, sequences))
    else:
        loss = sum(sum(s) for s in sequences) / (len(sequences) * constant)
    loss.backward()
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters() if p.grad is not None))
    return loss.item(), norm


def trained_round(make_trainer, shard_of, made, *flags):
    return make_trainer("--advantage-estimator", "dr_grpo", "--clip-grad", "0", *flags).train(0, shard_of(made))


@pytest.mark.parametrize("flags", [[], ["--loss-constant", "5"]])
def test_a_constant_divides_the_sum_of_every_sequence(flags, make_trainer, samples, shard_of, model_dir):
    made = samples(8)
    made[3].loss_mask[:] = 0
    advantages = rewards_above_mean(made)
    constant = 5 if flags else 64
    loss, norm = naive_gradient_norm(
        model_dir, made, lambda n, t, lp, h: -advantages[n] * torch.exp(lp - lp.detach()), "constant", constant
    )
    got = trained_round(
        make_trainer, shard_of, made, "--loss-aggregation", "constant", "--max-response-tokens", "64", *flags
    )
    assert got["train/loss"] == pytest.approx(loss, rel=1e-4)
    assert got["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_the_samples_of_a_fan_out_weigh_as_one(make_trainer, samples, shard_of, model_dir):
    made = samples(8)
    for sample in made:
        sample.rollout_index = max(4, sample.index)  # five siblings and three of their own
    advantages = rewards_above_mean(made)
    sizes = [sum(int(s.loss_mask.sum()) for s in made if s.rollout_index == one.rollout_index) for one in made]
    loss, norm = naive_gradient_norm(
        model_dir, made, lambda n, t, lp, h: -advantages[n] * torch.exp(lp - lp.detach()) / sizes[n], "constant", 0.5
    )
    got = trained_round(make_trainer, shard_of, made, "--loss-aggregation", "rollout", "--max-tokens-per-gpu", "30")
    # the naive sum is divided by 8 samples times 0.5, which is the number of rollouts
    assert got["train/loss"] == pytest.approx(loss, rel=1e-4)
    assert got["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_entropy_and_kl_terms_are_the_naive_ones(make_trainer, samples, shard_of, model_dir, other_model):
    made = samples(8)
    advantages = rewards_above_mean(made)
    reference = [distributions(other_model, sample)[0].detach() for sample in made]

    def loss_of(n, t, lp, h):
        x = lp - reference[n][t]
        return -advantages[n] * torch.exp(lp - lp.detach()) + 0.3 * (torch.exp(-x) - 1 + x) - 0.1 * h

    loss, norm = naive_gradient_norm(model_dir, made, loss_of)
    flags = ("--kl-loss-coef", "0.3", "--ref-model", str(other_model), "--entropy-coef", "0.1")
    got = trained_round(make_trainer, shard_of, made, *flags)
    assert got["train/loss"] == pytest.approx(loss, rel=1e-4)
    assert got["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    terms = [got[f"train/{name}"] for name in ("policy_loss", "kl_loss", "entropy_loss")]
    assert sum(terms) == pytest.approx(loss, rel=1e-4)
    assert got["train/kl_loss"] == pytest.approx(0.3 * got["train/ref_kl"], rel=1e-4)
    assert got["train/entropy_loss"] == pytest.approx(-0.1 * got["train/entropy"], rel=1e-4)


def test_the_unbiased_kl_term_weighs_its_estimate_by_the_ratio(make_trainer, samples, shard_of, model_dir, other_model):
    made = samples(8)
    advantages = rewards_above_mean(made)
    reference = [distributions(other_model, sample)[0].detach() for sample in made]

    def loss_of(n, t, lp, h):
        ratio = torch.exp(lp - lp.detach())
        return -advantages[n] * ratio + 0.3 * ratio * (lp - reference[n][t])

    loss, norm = naive_gradient_norm(model_dir, made, loss_of)
    flags = ("--kl-loss-coef", "0.3", "--kl-loss-type", "k1", "--kl-loss-unbiased", "--ref-model", str(other_model))
    got = trained_round(make_trainer, shard_of, made, *flags)
    assert got["train/loss"] == pytest.approx(loss, rel=1e-4)
    assert got["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_a_kl_reward_is_taken_off_every_tokens_advantage(make_trainer, samples, shard_of, model_dir, other_model):
    made = samples(8)
    advantages = rewards_above_mean(made)
    reference = [distributions(other_model, sample)[0].detach() for sample in made]

    def loss_of(n, t, lp, h):
        return -(advantages[n] - 0.2 * (lp.detach() - reference[n][t])) * torch.exp(lp - lp.detach())

    loss, norm = naive_gradient_norm(model_dir, made, loss_of)
    got = trained_round(make_trainer, shard_of, made, "--kl-coef", "0.2", "--ref-model", str(other_model))
    assert got["train/loss"] == pytest.approx(loss, rel=1e-4)
    assert got["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_a_teacher_joins_any_estimator(make_trainer, samples, shard_of, model_dir, other_model):
    made = samples(8)
    advantages = rewards_above_mean(made)
    teacher = [distributions(other_model, sample)[0].detach() for sample in made]

    def loss_of(n, t, lp, h):
        return -(advantages[n] - 0.3 * (lp.detach() - teacher[n][t])) * torch.exp(lp - lp.detach())

    loss, norm = naive_gradient_norm(model_dir, made, loss_of)
    flags = ["--teacher-kl-coef", "0.3", "--teacher-model", str(other_model)]
    got = trained_round(make_trainer, shard_of, made, *flags)
    assert got["train/loss"] == pytest.approx(loss, rel=1e-4)
    assert got["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("kind", ["tis", "icepop", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_corrected_rounds_are_the_naive_ones(kind, level, make_trainer, near_samples, shard_of, model_dir):
    made = near_samples(8)
    advantages = rewards_above_mean(made)
    low, high = 0.6, 1.5
    weights, outside = [], 0
    for sample in made:
        own = distributions(model_dir, sample)[0].detach().tolist()
        offs = [lp - e if m else 0.0 for lp, e, m in zip(own, sample.logprobs, sample.loss_mask, strict=True)]
        ratios = [math.exp(sum(offs) if level == "sequence" else off) for off in offs]
        inside = [low <= ratio <= high for ratio in ratios]
        outside += sum(not ok for ok, m in zip(inside, sample.loss_mask, strict=True) if m)
        choose = {
            "tis": lambda r, ok: min(max(r, low), high),
            "icepop": lambda r, ok: r * ok,
            "mask": lambda r, ok: float(ok),
        }[kind]
        weights.append([choose(r, ok) for r, ok in zip(ratios, inside, strict=True)])
    loss, norm = naive_gradient_norm(
        model_dir, made, lambda n, t, lp, h: -weights[n][t] * advantages[n] * torch.exp(lp - lp.detach())
    )
    flags = ["--importance-correction", kind, "--importance-level", level, "--importance-low", "0.6"]
    got = trained_round(make_trainer, shard_of, made, *flags, "--importance-high", "1.5")
    count = got["train/num_tokens"]
    assert got["train/loss"] == pytest.approx(loss, rel=1e-3, abs=1e-6)
    assert got["train/grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert got["train/importance_outside_fraction"] == pytest.approx(outside / count, abs=1.5 / count)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalised_weights_have_mean_1_in_every_step(level, make_trainer, near_samples, shard_of, model_dir):
    made = near_samples(8)
    advantages = rewards_above_mean(made)
    weights, averaged = [], []
    for sample in made:
        own = distributions(model_dir, sample)[0].detach().tolist()
        offs = [lp - e if m else 0.0 for lp, e, m in zip(own, sample.logprobs, sample.loss_mask, strict=True)]
        weights.append([min(math.exp(sum(offs) if level == "sequence" else off), 1.5) for off in offs])
        trained = [w for w, m in zip(weights[-1], sample.loss_mask, strict=True) if m]
        averaged += trained if level == "token" else trained[:1]
    mean = statistics.fmean(averaged)
    assert abs(mean - 1) > 0.02, "the case tests nothing"
    loss, norm = naive_gradient_norm(
        model_dir, made, lambda n, t, lp, h: -weights[n][t] / mean * advantages[n] * torch.exp(lp - lp.detach())
    )
    flags = ["--importance-correction", "tis", "--importance-level", level, "--importance-high", "1.5"]
    got = trained_round(make_trainer, shard_of, made, *flags, "--importance-normalize", "--max-tokens-per-gpu", "30")
    assert got["train/loss"] == pytest.approx(loss, rel=1e-3, abs=1e-6)
    assert got["train/grad_norm"] == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_of_tokens_go_with_rejection_by_another_ratio(level, make_trainer, near_samples, shard_of, model_dir):
    made = near_samples(8)
    advantages = rewards_above_mean(made)
    low, high = {"token": (0.7, 1.4), "sequence": (0.8, 2.0), "geometric": (0.97, 1.1)}[level]
    weights, kept, by_second = [], [], 0
    for sample in made:
        own = distributions(model_dir, sample)[0].detach().tolist()
        offs = [lp - e if m else 0.0 for lp, e, m in zip(own, sample.logprobs, sample.loss_mask, strict=True)]
        whole = sum(offs) / (int(sample.loss_mask.sum()) if level == "geometric" else 1)
        weights.append([min(math.exp(off), 1.5) for off in offs])
        inside = [low <= math.exp(off if level == "token" else whole) <= high for off in offs]
        kept.append([ok and 0.75 <= math.exp(off) <= 2.5 for ok, off in zip(inside, offs, strict=True)])
        by_second += sum(inside) - sum(kept[-1])
    counted = [
        ok for sample, oks in zip(made, kept, strict=True) for ok, m in zip(oks, sample.loss_mask, strict=True) if m
    ]
    assert 0 < by_second < len(counted) - sum(counted) < len(counted), "the case tests nothing"
    loss, norm = naive_gradient_norm(
        model_dir, made, lambda n, t, lp, h: -kept[n][t] * weights[n][t] * advantages[n] * torch.exp(lp - lp.detach())
    )
    flags = ["--importance-correction", "tis", "--importance-high", "1.5", "--importance-reject"]
    got = trained_round(make_trainer, shard_of, made, *flags, f"{level}={low}:{high}", "token=0.75:2.5")
    assert got["train/loss"] == pytest.approx(loss, rel=1e-3, abs=1e-6)
    assert got["train/grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert got["train/importance_rejected_fraction"] == pytest.approx(1 - sum(counted) / len(counted))


def test_a_sequence_with_one_impossible_token_is_vetoed(make_trainer, near_samples, shard_of, model_dir):
    made = near_samples(8)
    advantages = rewards_above_mean(made)
    broken = made[2]
    place = int(np.flatnonzero(broken.loss_mask)[-1])
    broken.logprobs[place] = 0.0  # the engine was sure of it; the trainer is not
    own = distributions(model_dir, broken)[0].detach()
    assert own[place] < math.log(1e-1)
    loss, norm = naive_gradient_norm(
        model_dir, made, lambda n, t, lp, h: -(n != 2) * advantages[n] * torch.exp(lp - lp.detach())
    )
    got = trained_round(make_trainer, shard_of, made, "--importance-veto", "0.1")
    assert got["train/loss"] == pytest.approx(loss, rel=1e-3, abs=1e-6)
    assert got["train/grad_norm"] == pytest.approx(norm, rel=1e-3)
    total = sum(int(sample.loss_mask.sum()) for sample in made)
    assert got["train/importance_vetoed_fraction"] == pytest.approx(int(broken.loss_mask.sum()) / total)


def test_mismatch_is_measured_without_any_correction(make_trainer, near_samples, shard_of, model_dir):
    made = near_samples(8)
    ratios = [
        math.exp(lp - engine)
        for sample in made
        for lp, engine, m in zip(
            distributions(model_dir, sample)[0].tolist(), sample.logprobs, sample.loss_mask, strict=True
        )
        if m
    ]
    got = trained_round(make_trainer, shard_of, made)
    assert got["train/mismatch_ratio"] == pytest.approx(statistics.fmean(ratios), rel=1e-4)
    assert got["train/mismatch_kl"] == pytest.approx(statistics.fmean(r - 1 - math.log(r) for r in ratios), rel=1e-4)


def test_sequences_far_off_with_negative_advantage_do_not_train(make_trainer, near_samples, shard_of, model_dir):
    made = near_samples(24)
    advantages = rewards_above_mean(made)
    far = []
    for number, sample in enumerate(made):
        own = distributions(model_dir, sample)[0].tolist()
        offs = [e - lp for lp, e, m in zip(own, sample.logprobs, sample.loss_mask, strict=True) if m]
        far.append(advantages[number] < 0 and statistics.fmean(offs) > 0.02)
    assert 0 < sum(far) < len(far), "the case tests nothing"
    loss, norm = naive_gradient_norm(
        model_dir, made, lambda n, t, lp, h: -(not far[n]) * advantages[n] * torch.exp(lp - lp.detach())
    )
    got = trained_round(make_trainer, shard_of, made, "--mask-offpolicy-delta", "0.02")
    assert got["train/loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert got["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_truncated_samples_count_in_their_group_but_do_not_train(make_trainer, samples, shard_of, model_dir):
    made = samples(8)
    advantages = rewards_above_mean(made)
    for sample in (made[1], made[6]):
        sample.status = Status.TRUNCATED
    got = trained_round(make_trainer, shard_of, made, "--mask-truncated")
    for sample in (made[1], made[6]):
        sample.loss_mask[:] = 0
    loss, norm = naive_gradient_norm(model_dir, made, lambda n, t, lp, h: -advantages[n] * torch.exp(lp - lp.detach()))
    assert got["train/loss"] == pytest.approx(loss, rel=1e-4)
    assert got["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert got["train/num_tokens"] == sum(int(sample.loss_mask.sum()) for sample in made)


def test_whitened_advantages_have_mean_0_and_variance_1_over_the_tokens(make_trainer, samples, shard_of):
    made = samples(8)
    got = trained_round(make_trainer, shard_of, made, "--whiten-advantages")
    assert got["train/advantage_mean"] == pytest.approx(0.0, abs=1e-6)
    assert got["train/advantage_std"] == pytest.approx(1.0, abs=1e-4)


def test_a_sample_without_a_reward_is_left_out_of_whitening(make_trainer, samples, shard_of):
    made = samples(8)
    made[2].reward = None
    got = trained_round(make_trainer, shard_of, made, "--whiten-advantages")
    silent = int(made[2].loss_mask.sum()) / got["train/num_tokens"]
    assert got["train/advantage_mean"] == pytest.approx(0.0, abs=1e-6)
    assert got["train/advantage_std"] == pytest.approx(math.sqrt(1 - silent), abs=1e-4)


def test_the_first_round_has_the_invariants_of_an_on_policy_step(make_trainer, samples, shard_of):
    got = trained_round(make_trainer, shard_of, samples(8), "--kl-loss-coef", "0.1", "--kl-coef", "0.1")
    assert abs(got["train/ppo_kl"]) < 1e-6
    assert abs(got["train/ref_kl"]) < 1e-8
    assert abs(got["train/kl_loss"]) < 1e-8
    assert got["train/clip_fraction"] == 0


@pytest.mark.parametrize(
    "estimator", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo"])
def test_the_micro_batch_budget_changes_nothing(estimator, loss, make_trainer, near_samples, shard_of):
    made = near_samples(12)
    flags = ["--advantage-estimator", estimator, "--policy-loss", loss, "--kl-coef", "0.1", "--entropy-coef", "0.01"]
    flags += ["--importance-correction", "tis", "--loss-aggregation", "constant", "--lr", "0"]
    results = []
    for budget in (1, 8192):
        trainer = make_trainer(*flags, "--max-tokens-per-gpu", str(budget))
        metrics = trainer.train(0, shard_of(made, step_ends=[5, 12]))
        results.append({name: value for name, value in metrics.items() if name.startswith("train/")})
    assert results[0] == pytest.approx(results[1], rel=1e-3, abs=1e-5)


def test_distillation_needs_no_rewards_and_nears_the_teacher(
    make_trainer, samples, shard_of, model_dir, other_model, tmp_path
):
    made = samples(8)
    for sample in made:
        sample.reward = None
    flags = ["--advantage-estimator", "opd", "--teacher-model", str(other_model), "--lr", "3e-3"]
    trainer = make_trainer(*flags)
    first, *_ = [trainer.train(step, shard_of(made)) for step in range(6)]
    assert first["train/loss"] == pytest.approx(first["train/opd_reverse_kl"], rel=1e-3)
    # what the teacher finds likelier than the student did becomes likelier, the rest less likely
    trainer.export(tmp_path / "model")
    gains = []
    for sample in made:
        before, after, teacher = (distributions(d, sample)[0] for d in (model_dir, tmp_path / "model", other_model))
        gains.append(((after - before) * (teacher - before).sign())[sample.loss_mask.astype(bool)])
    assert torch.cat(gains).mean() > 0


def test_a_converters_teacher_logprobs_teach_too(make_trainer, samples, shard_of, other_model):
    made = samples(4)
    shard = shard_of(made)
    logprobs = [distributions(other_model, sample)[0].detach().numpy() for sample in made]
    shard.batch.per_token["teacher_logprobs"] = np.concatenate(logprobs).astype(np.float32)
    carried = make_trainer("--advantage-estimator", "opd").train(0, shard)
    own = make_trainer("--advantage-estimator", "opd", "--teacher-model", str(other_model)).train(0, shard_of(made))
    for name in ("loss", "grad_norm", "opd_reverse_kl"):
        assert carried[f"train/{name}"] == pytest.approx(own[f"train/{name}"], rel=1e-4)


def test_opd_without_a_teacher_says_what_to_name(make_trainer, samples, shard_of):
    for flags in (["--advantage-estimator", "opd"], ["--teacher-kl-coef", "0.1"]):
        with pytest.raises(SlimeError, match="--teacher-model"):
            make_trainer(*flags).train(0, shard_of(samples(4)))


def test_a_renewed_reference_is_the_policy_and_survives_a_resume(make_trainer, samples, shard_of, tmp_path):
    flags = ["--kl-loss-coef", "0.1", "--ref-update-interval", "2", "--lr", "1e-2"]
    trainer = make_trainer(*flags)
    kls = [trainer.train(step, shard_of(samples(8, seed=step)))["train/ref_kl"] for step in range(3)]
    assert kls[0] < 1e-8 < kls[1]
    assert kls[2] < 1e-8, "round 2 starts from the reference that the end of round 1 renewed"
    trainer.save(tmp_path)
    resumed = make_trainer(*flags)
    resumed.load(tmp_path)
    left, right = (t.train(3, shard_of(samples(8, seed=3)))["train/ref_kl"] for t in (trainer, resumed))
    assert left == right > 1e-8


def test_a_teacher_of_another_vocabulary_is_refused(make_trainer, other_model, tmp_path):
    shutil.copytree(other_model, tmp_path / "teacher")
    tokenizer = tmp_path / "teacher" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"a": ', '"aa": ', 1))
    with pytest.raises(OptionError, match="another vocabulary"):
        make_trainer("--teacher-model", str(tmp_path / "teacher"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ref-model", "nowhere"], "--ref-model .*nowhere is not a model directory"),
        (["--ref-update-interval", "3"], "there is none"),
        (["--importance-correction", "tis", "--use-rollout-logprobs"], "drop one of them"),
        (["--importance-veto", "1e-4", "--use-rollout-logprobs"], "drop one of them"),
        (["--importance-reject", "token=0.5:2", "--use-rollout-logprobs"], "drop one of them"),
        (["--importance-reject", "turn=0.5:2"], "'turn=0.5:2' must look like LEVEL=LOW:HIGH"),
        (["--importance-reject", "token=2:0.5"], "wrong way round"),
        (["--importance-normalize"], "--importance-correction, which is not given"),
        (["--importance-low", "3", "--importance-high", "1"], "--importance-low 3 is above --importance-high 1"),
    ],
)
def test_options_that_cannot_work_are_refused(flags, message, model_dir):
    with pytest.raises(OptionError, match=message):
        parse(["--model", str(model_dir), *flags])


def test_every_metric_of_training_is_documented(make_trainer, near_samples, shard_of, other_model):
    everything = ["--advantage-estimator", "opd", "--teacher-model", str(other_model), "--ppo-clip-dual", "3"]
    everything += ["--kl-coef", "0.1", "--kl-loss-coef", "0.1", "--entropy-coef", "0.1", "--mask-offpolicy-delta", "1"]
    everything += ["--importance-reject", "sequence=0.5:2", "--importance-veto", "1e-4"]
    got = make_trainer(*everything, "--importance-correction", "icepop").train(0, shard_of(near_samples(4)))
    got |= make_trainer("--advantage-estimator", "ppo", "--critic").train(0, shard_of(near_samples(4)))
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert [name for name in got if name.startswith("train/") and f"`{name}`" not in page] == []
