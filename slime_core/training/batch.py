"""TensorBatch: the torch view of a TrainBatch, which the loss and the advantage estimator get as `batch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from slime_core.errors import SlimeError
from slime_core.types import IntArray, TrainBatch, spans

COMPUTED = ("kl_penalty", "old_logprobs", "ref_logprobs", "teacher_logprobs", "values", "advantages", "returns")
"""Per-token fields of a TensorBatch that the trainer sets, where it does."""


def alone(part: torch.Tensor) -> torch.Tensor:
    """The sum over ranks where there is one."""
    return part


@dataclass
class TensorBatch:
    """S samples with T tokens, of them R response tokens, all on one device. `batch["key"]` is a converter's extra key.

    The per-token fields hold the response tokens of sample after sample; `expand` brings one number a sample there.
    """

    host: TrainBatch
    """The numpy arrays that the tensors were made from."""
    tokens: torch.Tensor
    """[T] int64."""
    lengths: torch.Tensor
    """[S] int64, tokens of each sample, prompt included."""
    response_lengths: torch.Tensor
    """[S] int64."""
    loss_mask: torch.Tensor
    """[R] bool, the token is trained."""
    rollout_logprobs: torch.Tensor
    """[R] float32, the engine's; NaN where no engine sampled the token."""
    weight_versions: torch.Tensor
    """[R] int64, -1 where no engine sampled the token."""
    rewards: torch.Tensor
    """[S] float64, raw, NaN where a sample has none."""
    sample_index: torch.Tensor
    """[S] int64."""
    group_index: torch.Tensor
    """[S] int64."""
    rollout_index: torch.Tensor
    """[S] int64."""
    truncated: torch.Tensor
    """[S] bool."""
    extras: dict[str, Any]
    """A converter's extra keys, [S, ...] or [R, ...]: tensors, or numpy arrays of what torch cannot hold."""
    kl_penalty: torch.Tensor
    """[R] float32, `--kl-coef` times the divergence from the reference; 0 without it. An estimator takes it off."""
    old_logprobs: torch.Tensor | None = None
    """[R] float32, of the policy before the round's first update; estimators have them with --kl-coef or a teacher."""
    ref_logprobs: torch.Tensor | None = None
    """[R] float32, of the reference; None where no option asks for one."""
    teacher_logprobs: torch.Tensor | None = None
    """[R] float32, of `--teacher-model` or a converter's extra key of this name, NaN where unknown; None without."""
    values: torch.Tensor | None = None
    """[R] float32, of the critic before the round's first update; None without `--critic`."""
    advantages: torch.Tensor | None = None
    """[R] float32; None where the round has neither rewards nor a teacher."""
    returns: torch.Tensor | None = None
    """[R] float32, likewise."""
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] = alone
    """For an estimator: sums a flat tensor over the ranks, in place; every rank must call it, even without samples."""

    @classmethod
    def of(cls, batch: TrainBatch, device: torch.device) -> TensorBatch:
        """The same samples as tensors on the device."""

        def long(array: IntArray) -> torch.Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(device)

        extras = {key: _tensor(value, device) for key, value in (batch.per_sample | batch.per_token).items()}
        return cls(
            host=batch,
            tokens=long(batch.tokens),
            lengths=long(batch.lengths),
            response_lengths=long(batch.response_lengths),
            loss_mask=torch.from_numpy(batch.loss_mask.astype(np.bool_)).to(device),
            rollout_logprobs=torch.from_numpy(batch.rollout_logprobs.astype(np.float32)).to(device),
            weight_versions=long(batch.weight_versions),
            rewards=torch.from_numpy(batch.rewards.astype(np.float64)).to(device),
            sample_index=long(batch.sample_index),
            group_index=long(batch.group_index),
            rollout_index=long(batch.rollout_index),
            truncated=torch.from_numpy(batch.truncated.astype(np.bool_)).to(device),
            extras=extras,
            kl_penalty=torch.zeros(len(batch.loss_mask), device=device),
            teacher_logprobs=extras.get("teacher_logprobs"),
        )

    @property
    def num_samples(self) -> int:
        """S."""
        return self.host.num_samples

    @property
    def num_response_tokens(self) -> int:
        """R."""
        return len(self.loss_mask)

    @property
    def metadata(self) -> list[dict[str, Any] | None]:
        """[S] `train_metadata` of each sample."""
        return self.host.metadata

    @property
    def multimodal(self) -> list[dict[str, Any] | None]:
        """[S] images and the like of each sample."""
        return self.host.multimodal

    @property
    def known_advantages(self) -> torch.Tensor:
        """[R] float32, the advantages.

        Raises:
            SlimeError: when the round has none.
        """
        if self.advantages is None:
            raise SlimeError(
                "this policy loss needs advantages, but no sample has a reward; name one with --reward, or distill "
                "from a --teacher-model."
            )
        return self.advantages

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.tokens.device

    def __contains__(self, key: str) -> bool:
        return key in self.extras

    def __getitem__(self, key: str) -> Any:
        if key not in self.extras:
            known = ", ".join(map(repr, sorted(self.extras))) or "none"
            raise KeyError(f"the batch has no extra key '{key}'; the converter gave {known}")
        return self.extras[key]

    def expand(self, per_sample: torch.Tensor) -> torch.Tensor:
        """Repeat one value a sample, [S, ...], to each of its response tokens: [R, ...]."""
        return torch.repeat_interleave(per_sample, self.response_lengths, 0, output_size=self.num_response_tokens)

    def select(self, rows: Sequence[int] | IntArray) -> TensorBatch:
        """The samples at these positions, in this order, with their advantages and old log-probabilities."""
        picked = TensorBatch.of(self.host.select(rows), self.device)
        at = spans(self.host.response_lengths, np.asarray(rows, np.int64))
        response_rows = torch.from_numpy(at).to(self.device)
        for name in COMPUTED:
            value = getattr(self, name)
            setattr(picked, name, value if value is None else value[response_rows])
        return picked


def _tensor(array: Any, device: torch.device) -> Any:
    """The array as a tensor of its own dtype; as it is where torch has no such dtype (text, objects)."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device) if array.dtype.kind in "biufc" else array


def without_truncated(batch: TrainBatch) -> TrainBatch:
    """The batch with no trained token in samples that ended for length; their rewards still count in their group.

    Overlong filtering, Yu et al., "DAPO" (arXiv 2503.14476), section 3.4.
    """
    keep = np.repeat(~batch.truncated, batch.response_lengths)
    return replace(batch, loss_mask=np.where(keep, batch.loss_mask, 0).astype(batch.loss_mask.dtype))


def micro_batches(lengths: IntArray, rows: IntArray, max_tokens: int, *, padded: bool = False) -> list[IntArray]:
    """Split rows into micro-batches of at most `max_tokens` tokens, longest first, so that each holds similar lengths.

    A row longer than the budget gets a micro-batch of its own.

    Args:
        lengths: [S] tokens of every sample.
        rows: positions of those to split, in any order.
        max_tokens: the budget.
        padded: whether every row of a micro-batch takes as many tokens as its longest.

    Returns:
        Positions, each row once.
    """
    order = rows[np.argsort(-lengths[rows].astype(np.int64), kind="stable")]
    parts: list[list[int]] = []
    room = longest = 0
    for row in order.tolist():
        length = int(lengths[row])
        if not parts or (longest if padded else length) > room:
            parts.append([])
            room, longest = max_tokens, length
        parts[-1].append(row)
        room -= longest if padded else length
    return [np.array(part, np.int64) for part in parts]
