"""Megatron's distributed optimizer, with what it needs where neither Transformer-Engine nor Apex is installed."""

from __future__ import annotations

import argparse
import functools
import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, clip_grads, get_megatron_optimizer

from slime_core.training.megatron.model import MegatronModel
from slime_core.training.torch_backend.optimizer import lr_factor

NO_PARAMETER = "none"
"""In place of a parameter among an optimiser's states, where there is none."""


def wrap(args: argparse.Namespace, model: MegatronModel) -> None:
    """Put the model into Megatron's data parallelism, whose gradients are sums, not means."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
    )
    model.module = DistributedDataParallel(model.config, config, model.bare)
    # the loss is divided by the whole step's size already: no tokens to divide by
    model.config.finalize_model_grads_func = lambda modules, num_tokens=None, **kwargs: finalize_model_grads(modules)
    if args.overlap_grad_reduce:
        model.config.no_sync_func = model.module.no_sync


def gather_parameters(args: argparse.Namespace, model: MegatronModel) -> None:
    """Under --overlap-param-gather the new weights are fetched in the next forward; fetch them now."""
    if args.overlap_param_gather:
        model.module.disable_forward_pre_hook(param_sync=True)
        model.module.enable_forward_pre_hook()


class Optimizer:
    """AdamW over this rank's share of the parameters; the schedule is the torch backend's."""

    def __init__(self, args: argparse.Namespace, model: MegatronModel) -> None:
        self._args, self._model = args, model
        dtype = model.config.params_dtype
        config = OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            min_lr=0.0,
            weight_decay=args.weight_decay,
            adam_beta1=args.adam_betas[0],
            adam_beta2=args.adam_betas[1],
            adam_eps=args.adam_eps,
            clip_grad=args.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            overlap_param_gather=args.overlap_param_gather,
        )
        self.megatron: Any = get_megatron_optimizer(config, [model.module], use_gloo_process_groups=False)
        self.steps = 0
        """Optimiser steps so far, skipped ones included: the place in the schedule."""

    @property
    def lr(self) -> float:
        """Of the next step."""
        return float(self._args.lr) * lr_factor(self._args, self.steps)

    def zero_grad(self) -> None:
        """Set every gradient to 0."""
        self._model.module.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self) -> float:
        """Clip and update, unless the gradient is not finite; its norm over the whole model."""
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if math.isfinite(norm):
            self._clip(norm)
            self._set_rates()
            self.megatron.step_with_ready_grads()
        self.steps += 1
        return norm

    def skip(self) -> None:
        """Go on in the schedule without an update."""
        self.steps += 1

    @torch.no_grad()
    def prime(self) -> None:
        """Make the moments that the first update would make: Megatron saves and loads only what is there."""
        for part in self.megatron.chained_optimizers:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    state = part.optimizer.state[parameter]
                    if not state:
                        if isinstance(part.optimizer, torch.optim.Adam):  # Transformer-Engine's counts for all together
                            state["step"] = torch.zeros((), dtype=torch.float32)
                        state["exp_avg"] = torch.zeros_like(parameter)
                        state["exp_avg_sq"] = torch.zeros_like(parameter)
        counters = [
            moments["step"]
            for part in self.megatron.chained_optimizers
            for moments in part.optimizer.state.values()
            if "step" in moments
        ]
        for part in self.megatron.chained_optimizers:
            # a stage without experts has an optimiser of them too, whose counter Megatron reads
            if counters and not any(group["params"] for group in part.optimizer.param_groups):
                part.optimizer.state[NO_PARAMETER] = {"step": counters[0].clone()}

    def load_state(self, state: dict[str, Any], steps: int) -> None:
        """Take over what a checkpoint has, and the place in the schedule."""
        for part in self.megatron.chained_optimizers:
            # torch's AdamW counts steps by parameter, which Megatron would look for among the saved moments
            part._set_main_param_and_optimizer_states = functools.partial(_set_moments, part)
        self.megatron.load_state_dict(state)
        # Megatron gives all parameters one counter, which each of them would then raise at every update
        for part in self.megatron.chained_optimizers:
            for moments in part.optimizer.state.values():
                if "step" in moments:
                    moments["step"] = moments["step"].clone()
        self.steps = steps

    def _clip(self, norm: float) -> None:
        if not 0 < self._args.clip_grad < norm:
            return
        for part in self.megatron.chained_optimizers:
            clip_grads.clip_grad_by_total_norm_fp32(part.get_parameters(), self._args.clip_grad, norm)

    def _set_rates(self) -> None:
        """What Megatron's own scheduler would do: without it, norms and biases would decay."""
        for group in self.megatron.param_groups:
            group["lr"] = self.lr * group["lr_mult"]
            group["weight_decay"] = self._args.weight_decay * group["wd_mult"]


def _set_moments(part: Any, parameter: torch.nn.Parameter, saved: dict[str, torch.Tensor]) -> None:
    """Copy a parameter's master weight and moments from a checkpoint."""
    for name, own in part._get_main_param_and_optimizer_states(parameter).items():
        if name != "step":
            own.copy_(saved[name])
