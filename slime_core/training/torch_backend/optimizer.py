"""The optimiser: AdamW or StatelessAdam, Muon for the hidden matrices; float32 masters, clipping, learning rates."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from slime_core.training.ranks import Ranks
from slime_core.training.torch_backend.gradients import FlatGradients, Gradients, ShardedGradients
from slime_core.training.torch_backend.stateless_adam import StatelessAdam


class Optimizer:
    """Updates a model's trainable parameters, in float32: master copies of those that are kept in a shorter type."""

    def __init__(self, args: argparse.Namespace, model: nn.Module) -> None:
        self._args = args
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._parameters = list(named.values())
        self._masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self._parameters]
        self._names = list(named)
        self._parts = build_optimizers(args, model, dict(zip(map(id, self._parameters), self._masters, strict=True)))
        self.gradients: Gradients = (
            ShardedGradients(self._parameters)
            if any(isinstance(p, DTensor) for p in self._parameters)
            else FlatGradients(self._parameters, self._masters)
        )
        self.steps = 0
        """Optimiser steps so far, skipped ones included: the place in the schedule."""

    @property
    def lr(self) -> float:
        """`--lr` as the schedule has it at the next step."""
        return float(self._args.lr) * lr_factor(self._args, self.steps)

    def update(self, ranks: Ranks) -> float:
        """Sum the gradients over the ranks, clip them, and step unless they are not finite; their norm before."""
        self.gradients.sum_over(ranks)
        norm = self.gradients.norm(ranks)
        if math.isfinite(norm):
            limit = self._args.clip_grad
            if 0 < limit < norm:
                self.gradients.scale(limit / (norm + 1e-6))
            self._step()
        self.steps += 1
        return norm

    def _step(self) -> None:
        factor = lr_factor(self._args, self.steps)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = group["peak_lr"] * factor
            part.step()
        self._copy_masters()

    def _copy_masters(self) -> None:
        pairs = [(p, m) for p, m in zip(self._parameters, self._masters, strict=True) if p is not m]
        with torch.no_grad():
            for parameter, master in pairs:
                parameter.copy_(master)

    def skip(self) -> None:
        """Go on in the schedule without an update."""
        self.steps += 1

    def weights(self) -> dict[str, torch.Tensor]:
        """What is updated, by the parameters' names; float32."""
        return {name: master.detach() for name, master in zip(self._names, self._masters, strict=True)}

    def state(self) -> dict[str, torch.Tensor]:
        """The optimiser's own tensors as `PARAMETER/ENTRY`; none before the first step."""
        return {
            f"{name}/{entry}": value
            for name, master in zip(self._names, self._masters, strict=True)
            for part in self._parts
            for entry, value in part.state.get(master, {}).items()
        }

    def reset(self) -> None:
        """Forget the moments; the place in the schedule stays."""
        for part in self._parts:
            part.state.clear()

    def prime(self) -> None:
        """Make the state of a first step, all 0, without one."""
        self.gradients.zero()
        for master in self._masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = 0.0
            part.step()
        self.gradients.zero()

    def loaded(self, steps: int) -> None:
        """Go on after `steps` with the weights and the state that were written into these tensors."""
        self.steps = steps
        self._copy_masters()


def build_optimizers(
    args: argparse.Namespace, model: nn.Module, masters: Mapping[int, torch.Tensor]
) -> list[torch.optim.Optimizer]:
    """AdamW or `StatelessAdam` over everything; or Muon (Jordan, 2024) over the hidden matrices, AdamW over the rest.

    Parameters with fewer than two dimensions (norms, biases) get no weight decay.

    Args:
        args: the options.
        model: whose parameters with `requires_grad` are meant.
        masters: id of each of them -> the tensor to update for it.
    """
    outside = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        outside.add(id(head.weight))
    trainable = [p for p in model.parameters() if p.requires_grad]
    by_muon = {id(p) for p in trainable if args.optimizer == "muon" and p.ndim == 2 and id(p) not in outside}
    rest = [p for p in trainable if id(p) not in by_muon]
    groups = [
        {"params": [masters[id(p)] for p in rest if p.ndim >= 2], "weight_decay": args.weight_decay},
        {"params": [masters[id(p)] for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    parts: list[torch.optim.Optimizer] = []
    adams = [{**group, "peak_lr": args.lr} for group in groups if group["params"]]
    if adams and args.optimizer == "stateless_adam":
        parts.append(StatelessAdam(adams, lr=args.lr, eps=args.adam_eps))
    elif adams:
        betas = tuple(args.adam_betas)
        parts.append(torch.optim.AdamW(adams, lr=args.lr, betas=betas, eps=args.adam_eps, fused=True))
    if by_muon:
        matrices = [masters[id(p)] for p in trainable if id(p) in by_muon]
        group = {"params": matrices, "peak_lr": args.muon_lr}
        parts.append(torch.optim.Muon([group], lr=args.muon_lr, weight_decay=args.weight_decay))
    return parts


def lr_factor(args: argparse.Namespace, step: int) -> float:
    """What the peak learning rate is multiplied by at optimiser step `step`, counted from 0.

    A linear rise over `--lr-warmup-steps`, then by `--lr-schedule` down to 0 just after the last step of the run. Steps
    of `--critic-only-rounds` are none of the policy's.
    """
    rounds = args.num_rollout - (args.critic_only_rounds if args.critic else 0)
    warmup, total = args.lr_warmup_steps, rounds * args.num_steps_per_rollout
    if step < warmup:
        return float((step + 1) / warmup)
    if args.lr_schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return 1.0 - done if args.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
