"""MegatronTrainer: one rank of a model that is cut by tensor, pipeline, expert and data parallelism.

Import this module after `device.prepare_megatron`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime_core.options import needs_reference
from slime_core.plugins import load_plugins
from slime_core.training.batch import TensorBatch
from slime_core.training.megatron import checkpoint
from slime_core.training.megatron.convert import load_weights, named_weights, weight_map
from slime_core.training.megatron.critic import Critic
from slime_core.training.megatron.hugging_face import save_hugging_face, stacked_experts
from slime_core.training.megatron.model import MegatronModel, Row, build_model
from slime_core.training.megatron.optimizer import Optimizer, gather_parameters, wrap
from slime_core.training.megatron.passes import differentiate, evaluate, on_every_stage, shares
from slime_core.training.megatron.ranks import MegatronRanks
from slime_core.training.megatron.routing import RoutingReplay
from slime_core.training.model_files import TRAINER, check_vocabulary, write_dtype
from slime_core.training.round import MicroLoss, Round
from slime_core.types import FloatArray, IntArray, Shard


class MegatronTrainer:
    """A rank of the Megatron backend; see `slime_core.training.trainer.Trainer` for what its methods promise."""

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        rank: int,
        world_size: int,
        master_address: str,
        master_port: int,
        device: str,
    ) -> None:
        if args.trainer_threads is not None:
            torch.set_num_threads(args.trainer_threads)
        torch.manual_seed(args.seed)
        self._args = args
        self._device = torch.device(device)
        self._plugins = load_plugins(args, [args.advantage_estimator, args.policy_loss])
        self.ranks = MegatronRanks.join(
            args, rank, world_size, address=master_address, port=master_port, device=self._device
        )
        if needs_reference(args):
            check_vocabulary(args, "--ref-model", args.ref_model)
        check_vocabulary(args, "--teacher-model", args.teacher_model)
        check_vocabulary(args, "--critic-model", args.critic_model)
        self._policy = self._load(args.model)
        self._routing = RoutingReplay.of(self._policy.bare) if args.routing_replay else None
        self._reference = self._load(args.ref_model or args.model) if needs_reference(args) else None
        self._teacher = self._load(args.teacher_model) if args.teacher_model is not None else None
        self._weight_map = weight_map(self._policy, self.ranks.world)
        wrap(args, self._policy)
        self.optimizer = Optimizer(args, self._policy)
        self.critic = Critic(args, self.ranks) if args.critic else None
        self._round = Round(args, self, self._plugins)

    def _load(self, directory: str) -> MegatronModel:
        model = build_model(self._args, directory, self._device)
        load_weights(model, Path(directory))
        return model

    # --- a round ------------------------------------------------------------------------------------------------------
    def train(self, step: int, shard: Shard) -> dict[str, float]:
        """Train one round; the metrics are the same on every rank."""
        if self._routing is not None:
            self._routing.forget()
        return self._round.train(step, shard)

    def early_logprobs(self, shard: Shard) -> dict[str, Any]:
        """Log-probabilities of samples whose round is still being generated."""
        return self._round.early_logprobs(shard)

    @property
    def lr(self) -> float:
        """Of the next step."""
        return self.optimizer.lr

    def logprobs(self, batch: TensorBatch, rows: IntArray) -> torch.Tensor:
        """Log-probabilities [R] of the policy at these samples, 0 at the others."""
        return evaluate(self._policy, batch, self._shares(batch, rows), self._routing)

    def reference_logprobs(self, batch: TensorBatch, rows: IntArray) -> torch.Tensor | None:
        """Those of the reference, where there is one."""
        return None if self._reference is None else self._recompute(self._reference, batch, rows)

    def teacher_logprobs(self, batch: TensorBatch, rows: IntArray) -> torch.Tensor | None:
        """Those of the teacher, where there is one."""
        return None if self._teacher is None else self._recompute(self._teacher, batch, rows)

    @torch.no_grad()
    def renew_reference(self) -> None:
        """Make the policy's present weights the reference's."""
        if self._reference is not None:
            gather_parameters(self._args, self._policy)
            self._reference.bare.load_state_dict(self._policy.bare.state_dict())

    def _recompute(self, model: MegatronModel, batch: TensorBatch, rows: IntArray) -> torch.Tensor:
        return evaluate(model, batch, self._shares(batch, rows))

    def _shares(self, batch: TensorBatch, rows: IntArray) -> list[IntArray]:
        return shares(batch, rows, self.ranks.data_parallel, self._args.max_tokens_per_gpu)

    def backward(self, batch: TensorBatch, rows: IntArray, loss: MicroLoss) -> None:
        """Forward and backward of this rank's share of a step, micro-batch by micro-batch, through all stages."""
        self.optimizer.zero_grad()
        differentiate(self._policy, batch, self._shares(batch, rows), loss, self._routing)

    def update(self) -> float:
        """Update, or skip; the gradient norm over the whole model."""
        return self.optimizer.step()

    def skip(self) -> None:
        """Go on in the schedule without an update."""
        self.optimizer.skip()

    # --- weights and checkpoints --------------------------------------------------------------------------------------
    def weights(self, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights for the engines, under Hugging Face names, gathered one parameter at a time; on every rank."""
        gather_parameters(self._args, self._policy)
        tensors = named_weights(self._policy, self._weight_map, getattr(torch, dtype))
        # the embedded engine is a transformers model; SGLang takes the names of published files
        return stacked_experts(tensors) if self._args.engine == "embedded" else tensors

    def prompt_logprobs(self, tokens: Sequence[int]) -> FloatArray:
        """Log-probabilities [n - 1] of a prompt's tokens under the present weights; on every rank."""
        ids = torch.tensor(tokens, dtype=torch.int64, device=self._device)
        places = torch.arange(len(tokens) - 1, device=self._device)
        found = torch.zeros(len(places), device=self._device)
        row = Row(ids, np.array([len(tokens)], np.int64), places, ids[1:])

        def keep(number: int, logprobs: torch.Tensor, entropy: torch.Tensor) -> None:
            found.copy_(logprobs)

        self._policy.run([row], keep, backward=False, temperature=1.0)
        logprobs: FloatArray = on_every_stage(found).cpu().numpy()
        return logprobs

    def broadcast(self, message: dict[str, object] | None) -> dict[str, Any]:
        """Rank 0's JSON-able message, on every rank."""
        return self.ranks.world.broadcast(message)

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        return self._policy.dims.vocab_size

    @property
    def dtype(self) -> str:
        """Of the weights, for example `float32`."""
        return str(self._policy.config.params_dtype).removeprefix("torch.")

    def save(self, directory: Path) -> None:
        """Write the training state in Megatron's torch_dist format."""
        gather_parameters(self._args, self._policy)
        if self.critic is not None:
            gather_parameters(self._args, self.critic.model)
        renewed = self._reference if self._args.ref_update_interval is not None else None
        state = checkpoint.State(self._policy, self.optimizer, renewed, self.critic)
        checkpoint.save(state, self.ranks.world, Path(self._args.model), directory / TRAINER)

    def saved(self, *, wait: bool) -> bool:
        """It is: `save` returns when all is written."""
        return True

    def export(self, directory: Path) -> None:
        """Write the policy as transformers reads it; rank 0 does, the others give it their parts."""
        gather_parameters(self._args, self._policy)
        weights = named_weights(self._policy, self._weight_map, self._policy.config.params_dtype)
        save_hugging_face(weights, Path(self._args.model), directory, self.ranks.rank == 0)
        if self.ranks.rank == 0:
            write_dtype(directory, self._policy.config.params_dtype)

    def load(self, directory: Path) -> None:
        """Go on from a checkpoint, of any layout."""
        state = checkpoint.State(self._policy, self.optimizer, self._reference, self.critic)
        checkpoint.load(state, directory / TRAINER)

    def close(self) -> None:
        """Leave the process groups and close the plugins."""
        self._plugins.close()
        self.ranks.leave()
