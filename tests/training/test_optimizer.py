"""Parameter groups, schedule, clipping and flat gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from slime_core.engines.checksum import model_checksums
from slime_core.training.ranks import Ranks
from slime_core.training.torch_backend.optimizer import Optimizer, build_optimizers, lr_factor
from slime_core.training.value_objective import critic_options

ALONE = Ranks(0, 1, torch.device("cpu"), grouped=False)


def parts_of(args, model):
    return build_optimizers(args, model, {id(p): p for p in model.parameters()})


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.norm = nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_one_dimensional_parameters_do_not_decay(make_args):
    model = Tiny()
    (adamw,) = parts_of(make_args("--weight-decay", "0.1"), model)
    decay = {id(p): group["weight_decay"] for group in adamw.param_groups for p in group["params"]}
    assert decay == {id(p): 0.1 if p.ndim > 1 else 0.0 for p in model.parameters()}


def test_muon_takes_the_hidden_matrices_alone(make_args):
    model = Tiny()
    adamw, muon = parts_of(make_args("--optimizer", "muon", "--muon-lr", "0.05"), model)
    assert [p is model.hidden.weight for group in muon.param_groups for p in group["params"]] == [True]
    assert sum(len(group["params"]) for group in adamw.param_groups) == len(list(model.parameters())) - 1
    assert muon.param_groups[0]["lr"] == 0.05


def test_stateless_adam_is_a_fresh_adamw_in_every_step(make_args):
    args = make_args("--lr", "0.1", "--weight-decay", "0.2", "--optimizer", "stateless_adam")
    torch.manual_seed(0)
    ours, expected = Tiny(), Tiny()
    expected.load_state_dict(ours.state_dict())
    (stateless,) = parts_of(args, ours)
    for scale in (1.0, -3.0, 1e-8):
        (fresh,) = parts_of(make_args("--lr", "0.1", "--weight-decay", "0.2"), expected)
        for left, right in zip(ours.parameters(), expected.parameters(), strict=True):
            left.grad = scale * torch.randn_like(left)
            right.grad = left.grad.clone()
        stateless.step()
        fresh.step()
        for left, right in zip(ours.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    assert not stateless.state


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.5, 1.0, *[0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(5)]]),
    ],
)
def test_the_schedule_rises_and_falls_to_0_over_the_run(schedule, expected, make_args):
    args = make_args(
        "--lr-warmup-steps", "2", "--lr-schedule", schedule, "--num-rollout", "3", "--num-steps-per-rollout", "2"
    )
    assert [lr_factor(args, step) for step in range(7)] == pytest.approx(expected)


def test_the_schedule_falls_to_0_over_the_rounds_that_train_the_policy(make_args):
    flags = (
        "--advantage-estimator",
        "ppo",
        "--lr-schedule",
        "linear",
        "--num-rollout",
        "6",
        "--critic-only-rounds",
        "2",
    )
    args = make_args(*flags, "--critic", "--num-steps-per-rollout", "2")
    assert [lr_factor(args, step) for step in (0, 4, 7, 8)] == pytest.approx([1.0, 0.5, 0.125, 0.0])
    assert [lr_factor(critic_options(args), step) for step in (0, 6, 12)] == pytest.approx([1.0, 0.5, 0.0])


def test_both_parts_of_muon_follow_the_schedule(make_args):
    model = Tiny()
    flags = ("--optimizer", "muon", "--lr", "1.0", "--muon-lr", "4.0", "--lr-warmup-steps", "4")
    optimizer = Optimizer(make_args(*flags), model)
    assert optimizer.lr == 0.25
    optimizer.update(ALONE)
    assert optimizer.lr == 0.5
    optimizer.skip()
    assert optimizer.lr == 0.75


def test_clipping_is_by_the_global_norm(make_args):
    torch.manual_seed(0)
    models = [Tiny(), Tiny()]
    models[1].load_state_dict(models[0].state_dict())
    ours = Optimizer(make_args("--lr", "0.1", "--clip-grad", "0.5", "--adam-eps", "1.0"), models[0])
    theirs = torch.optim.AdamW(models[1].parameters(), lr=0.1, eps=1.0, weight_decay=0.0)
    for model in models:
        model.head(model.norm(model.hidden(model.embed(torch.arange(5))))).pow(2).sum().mul(50).backward()
    norm = ours.update(ALONE)
    assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_(models[1].parameters(), 0.5).item())
    assert norm > 0.5
    theirs.step()
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_gradients_are_views_of_one_buffer(make_args):
    model = Tiny()
    gradients = Optimizer(make_args(), model).gradients
    gradients.flat.fill_(2.0)
    assert all((p.grad == 2).all() for p in model.parameters())
    assert gradients.norm(ALONE) == pytest.approx(2 * math.sqrt(68))
    gradients.zero()
    assert gradients.norm(ALONE) == 0


def test_a_nonfinite_gradient_changes_nothing_but_the_place_in_the_schedule(make_args):
    model = Tiny()
    optimizer = Optimizer(make_args("--lr", "0.1"), model)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.gradients.flat[3] = float("nan")
    assert math.isnan(optimizer.update(ALONE))
    assert optimizer.steps == 1
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_updates_smaller_than_a_bfloat16_step_are_not_lost(make_args):
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    optimizer = Optimizer(make_args("--lr", "1e-4"), model)
    for _ in range(100):  # each moves the weight by 1e-4; the next smaller number in bfloat16 is 1 - 4e-3
        optimizer.gradients.zero()
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        optimizer.update(ALONE)
    assert optimizer.weights()["weight"].item() == pytest.approx(0.99, abs=1e-5)
    assert model.weight.item() == pytest.approx(0.99, abs=2e-3)


def test_gradients_of_micro_batches_add_up_in_float32(make_args):
    model = nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = Optimizer(make_args(), model)
    for _ in range(300):  # bfloat16 would stop at 256
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    assert optimizer.gradients.norm(ALONE) == 300


def test_a_reset_optimiser_goes_on_as_a_fresh_one(make_trainer, samples, shard_of, tmp_path):
    kept, reset = make_trainer(), make_trainer("--reset-optimizer-state")
    for trainer in (kept, reset):
        trainer.train(0, shard_of(samples(8)))
    reset.export(tmp_path / "after")
    fresh = make_trainer(model=tmp_path / "after")
    sums = []
    for trainer in (kept, reset, fresh):
        trainer.train(1, shard_of(samples(8, seed=1)))
        sums.append(model_checksums(trainer.weights("float32")))
    assert sums[1] == sums[2] != sums[0]
