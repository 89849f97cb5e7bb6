"""The optimiser: AdamW, or Muon for the hidden matrices; flat gradients, clipping and the learning-rate schedule."""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import nn


class Optimizer:
    """Updates a model's trainable parameters from flat gradient buffers, which ranks sum in one go."""

    def __init__(self, args: argparse.Namespace, model: nn.Module) -> None:
        self._args = args
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._parts = build_optimizers(args, model)
        self.gradients = _flat_gradients(self._parameters)
        """One flat buffer a dtype; each parameter's `.grad` is a view of it."""
        self.steps = 0
        """Optimiser steps so far, skipped ones included: the place in the schedule."""

    @property
    def lr(self) -> float:
        """`--lr` as the schedule has it at the next step."""
        return float(self._args.lr) * lr_factor(self._args, self.steps)

    def zero_grad(self) -> None:
        """Set every gradient to 0."""
        for flat in self.gradients:
            flat.zero_()

    def grad_norm(self) -> float:
        """The global 2-norm of the gradients."""
        return math.hypot(*(torch.linalg.vector_norm(flat, dtype=torch.float32).item() for flat in self.gradients))

    def step(self, grad_norm: float) -> None:
        """Clip the gradients, whose norm is given, and update the parameters."""
        limit = self._args.clip_grad
        if 0 < limit < grad_norm:
            for flat in self.gradients:
                flat.mul_(limit / (grad_norm + 1e-6))
        factor = lr_factor(self._args, self.steps)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = group["peak_lr"] * factor
            part.step()
        self.steps += 1

    def skip(self) -> None:
        """Go on in the schedule without an update."""
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers only."""
        return {"steps": self.steps, "parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ValueError: when it is of another optimiser or model.
        """
        if len(state["parts"]) != len(self._parts):
            raise ValueError("the state is of another --optimizer")
        for part, saved in zip(self._parts, state["parts"], strict=True):
            peaks = [group["peak_lr"] for group in part.param_groups]
            part.load_state_dict(saved)
            for group, peak in zip(part.param_groups, peaks, strict=True):
                group["peak_lr"] = peak
        self.steps = state["steps"]


def build_optimizers(args: argparse.Namespace, model: nn.Module) -> list[torch.optim.Optimizer]:
    """AdamW over everything, or Muon (Jordan, 2024) over the hidden matrices and AdamW over the rest.

    Parameters with fewer than two dimensions (norms, biases) get no weight decay.
    """
    outside = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        outside.add(id(head.weight))
    trainable = [p for p in model.parameters() if p.requires_grad]
    by_muon = {id(p) for p in trainable if args.optimizer == "muon" and p.ndim == 2 and id(p) not in outside}
    rest = [p for p in trainable if id(p) not in by_muon]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    parts: list[torch.optim.Optimizer] = []
    if rest:
        parts.append(
            torch.optim.AdamW(
                [{**g, "peak_lr": args.lr} for g in groups if g["params"]],
                lr=args.lr,
                betas=tuple(args.adam_betas),
                eps=args.adam_eps,
                fused=True,
            )
        )
    if by_muon:
        matrices = [p for p in trainable if id(p) in by_muon]
        group = {"params": matrices, "peak_lr": args.muon_lr}
        parts.append(torch.optim.Muon([group], lr=args.muon_lr, weight_decay=args.weight_decay))
    return parts


def lr_factor(args: argparse.Namespace, step: int) -> float:
    """What the peak learning rate is multiplied by at optimiser step `step`, counted from 0.

    A linear rise over `--lr-warmup-steps`, then by `--lr-schedule` down to 0 just after the last step of the run.
    """
    warmup, total = args.lr_warmup_steps, args.num_rollout * args.num_steps_per_rollout
    if step < warmup:
        return float((step + 1) / warmup)
    if args.lr_schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return 1.0 - done if args.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def _flat_gradients(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """Give every parameter a `.grad` that is a view of one flat buffer a dtype, and return the buffers."""
    buffers = []
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        mine = [p for p in parameters if p.dtype == dtype]
        flat = torch.zeros(sum(p.numel() for p in mine), dtype=dtype, device=mine[0].device)
        for p, view in zip(mine, flat.split([p.numel() for p in mine]), strict=True):
            p.grad = view.view_as(p)
        buffers.append(flat)
    return buffers
