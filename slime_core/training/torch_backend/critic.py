"""The critic of PPO: a model of its own that says what return to expect before each response token."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from slime_core.training.batch import TensorBatch, micro_batches
from slime_core.training.meters import Meters
from slime_core.training.model_files import check_vocabulary
from slime_core.training.ranks import Ranks
from slime_core.training.torch_backend.load import compute_dtype, load_model, place, probe
from slime_core.training.torch_backend.model import Policy
from slime_core.training.torch_backend.optimizer import Optimizer
from slime_core.training.torch_backend.sharding import Entry, in_step, run
from slime_core.training.value_objective import ValueLoss, critic_options
from slime_core.types import IntArray


class Critic(nn.Module):
    """The body of a causal LM and a linear head, which starts at 0; trained beside the policy, step by step."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks, max_tokens: int) -> None:
        super().__init__()
        self._args, self._ranks, self._max_tokens = args, ranks, max_tokens
        self._sharded = args.data_parallel == "fsdp2"
        check_vocabulary(args, "--critic-model", args.critic_model)
        model = load_model(args, ranks.device, args.critic_model or args.model)
        self.body = model.base_model
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        place(args, self.head, ranks, torch.float32)
        place(args, self, ranks, compute_dtype(args, ranks.device))
        packs, _ = probe(self, model, ranks.device)
        # a dataclass, not a module: only the body is this critic's
        self._model = Policy(Entry(model), ranks.device, compute_dtype(args, ranks.device), 1.0, packs, None)
        self.optimizer = Optimizer(critic_options(args), self)

    def get_output_embeddings(self) -> nn.Module:
        """The head, which Muon leaves to AdamW."""
        return self.head

    def forward(self, compute: Callable[..., Any], *inputs: Any) -> Any:
        """compute(*inputs), as of an `Entry`."""
        return compute(*inputs)

    def _values(self, batch: TensorBatch | None) -> torch.Tensor:
        """The value before each response token: float32 [R]; without a batch, one of a made-up prompt."""
        states = self._model.idle_states() if batch is None else self._model.states(batch)
        values: torch.Tensor = self.head(states.float())
        return values[:, 0].clone()

    def values(self, batch: TensorBatch, rows: IntArray) -> torch.Tensor:
        """Values [R] of these samples, without gradient, 0 at the others."""
        found = torch.zeros_like(batch.rollout_logprobs)
        lengths = batch.host.response_lengths.astype("int64")
        by_sample = list(torch.split(found, lengths.tolist()))
        with torch.no_grad():
            for some in self._micro_batches(batch, rows):
                values = run(self, self._values, None if some is None else batch.select(some))
                if some is not None:
                    parts = torch.split(values, lengths[some].tolist())
                    for row, part in zip(some, parts, strict=True):
                        by_sample[row].copy_(part)
        return found

    def train_step(self, batch: TensorBatch, rows: IntArray, meters: Meters) -> float | None:
        """One optimiser step towards the returns, over all ranks' trained tokens of samples with a reward; its norm.

        None where there are none.
        """
        loss = ValueLoss.of_step(self._args, batch, rows, self._ranks, meters)
        self.optimizer.gradients.zero()
        for some in self._micro_batches(batch, rows):
            if some is None:
                (0.0 * run(self, self._values, None).sum()).backward()
                continue
            part = batch.select(some)
            loss(part, run(self, self._values, part)).backward()
        if loss.num_tokens:
            return self.optimizer.update(self._ranks)
        self.optimizer.skip()
        return None

    def _micro_batches(self, batch: TensorBatch, rows: IntArray) -> Iterator[IntArray | None]:
        parts = micro_batches(batch.host.lengths, rows, self._max_tokens, padded=not self._model.packs)
        return in_step(parts, self._ranks, sharded=self._sharded)
