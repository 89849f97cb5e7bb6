"""Parameter groups, schedule, clipping and flat gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from slime_core.training.torch_backend.optimizer import Optimizer, build_optimizers, lr_factor


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.norm = nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_one_dimensional_parameters_do_not_decay(make_args):
    model = Tiny()
    (adamw,) = build_optimizers(make_args("--weight-decay", "0.1"), model)
    decay = {id(p): group["weight_decay"] for group in adamw.param_groups for p in group["params"]}
    assert decay == {id(p): 0.1 if p.ndim > 1 else 0.0 for p in model.parameters()}


def test_muon_takes_the_hidden_matrices_alone(make_args):
    model = Tiny()
    adamw, muon = build_optimizers(make_args("--optimizer", "muon", "--muon-lr", "0.05"), model)
    assert [p is model.hidden.weight for group in muon.param_groups for p in group["params"]] == [True]
    assert sum(len(group["params"]) for group in adamw.param_groups) == len(list(model.parameters())) - 1
    assert muon.param_groups[0]["lr"] == 0.05


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


def test_both_parts_of_muon_follow_the_schedule(make_args):
    model = Tiny()
    flags = ("--optimizer", "muon", "--lr", "1.0", "--muon-lr", "4.0", "--lr-warmup-steps", "4")
    optimizer = Optimizer(make_args(*flags), model)
    assert optimizer.lr == 0.25
    optimizer.step(0.0)
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
    norm = ours.grad_norm()
    assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_(models[1].parameters(), 0.5).item())
    assert norm > 0.5
    ours.step(norm)
    theirs.step()
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_gradients_are_views_of_one_buffer_a_dtype(make_args):
    model = Tiny()
    model.norm.to(torch.bfloat16)
    optimizer = Optimizer(make_args(), model)
    assert sorted(len(flat) for flat in optimizer.gradients) == [8, 60]
    for flat in optimizer.gradients:
        flat.fill_(2.0)
    assert all((p.grad == 2).all() for p in model.parameters())
    assert optimizer.grad_norm() == pytest.approx(2 * math.sqrt(68))
    optimizer.zero_grad()
    assert optimizer.grad_norm() == 0


def test_state_of_another_optimizer_is_refused(make_args):
    muon = Optimizer(make_args("--optimizer", "muon"), Tiny())
    with pytest.raises(ValueError, match="--optimizer"):
        Optimizer(make_args(), Tiny()).load_state_dict(muon.state_dict())
