"""Routing replay in Megatron's parts: in an update a token goes to the experts of before the round's first one.

Zheng et al., "Group Sequence Policy Optimization" (arXiv 2507.18071), section 5.3. What a row's tokens choose travels
with the row to every layer (`PackedSequences.experts`), so that each of the micro-batches in flight has its own, when a
layer is computed again too. A router asks here in place of megatron-core's RouterReplay, which has one target for all
of them and a list of all routers of the process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from slime_core.training.megatron.context import Cut
from slime_core.types import IntArray

Choice = tuple[torch.Tensor, torch.Tensor]
"""Scores [P, k] of the chosen experts, and which they are, int64 [P, k]."""


class RoutingReplay:
    """Remembers where a round's samples went among the experts of this stage's layers."""

    def __init__(self, layers: list[TransformerLayer]) -> None:
        """Let rows decide what these layers, each with a router, choose."""
        for number, layer in enumerate(layers):
            _Router(layer, number)
        self._none = torch.zeros(0, len(layers), layers[0].config.moe_router_topk, dtype=torch.int16)
        self._experts: dict[int, torch.Tensor] = {}
        """Row -> int16 [tokens, layers, k], on the CPU."""

    @classmethod
    def of(cls, model: GPTModel) -> RoutingReplay | None:
        """Of a policy's part on this rank; None where its layers have no experts."""
        layers = [layer for layer in model.decoder.layers if isinstance(layer.mlp, MoELayer)]
        return cls(layers) if layers else None

    def forget(self) -> None:
        """A new round begins."""
        self._experts = {}

    def keep(self, rows: IntArray, lengths: IntArray, experts: torch.Tensor) -> None:
        """Remember where the tokens [T, layers, k] of these rows [S] of these lengths [S] went."""
        of_rows = experts.to("cpu", torch.int16).split(lengths.tolist())
        self._experts.update(zip(rows.tolist(), of_rows, strict=True))

    def kept(self, rows: IntArray) -> torch.Tensor:
        """Where the tokens [T, layers, k] of these rows went."""
        return torch.cat([self._none, *(self._experts[row] for row in rows.tolist())])


@dataclass(frozen=True)
class Layout:
    """Where the T tokens of a row are among the P that a router of this rank sees."""

    at: torch.Tensor
    """[T] int64, in the padded row."""
    total: int
    """Tokens of the padded row."""
    cut: Cut | None
    """Over the context-parallel ranks; None where there is one."""
    group: dist.ProcessGroup | None
    """Sequence parallelism: the ranks that share out the tokens once more; None without."""

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """[P, ...] of every rank -> [T, ...], on every rank."""
        if self.group is not None:
            part = gather_from_sequence_parallel_region(part, group=self.group)
        if self.cut is not None:
            part = self.cut.whole(part, alike=True)
        return part.index_select(0, self.at)

    def local(self, values: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        """[T, ...] -> [P, ...], with [...] for the padding."""
        row = padding.repeat(self.total, *[1] * padding.ndim).index_copy(0, self.at, values)
        if self.cut is not None:
            row = row.index_select(0, self.cut.own)
        return row if self.group is None else row.chunk(self.group.size())[self.group.rank()]


class Noted:
    """Experts that a row's tokens choose freely, noted."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._of_layers: list[torch.Tensor] = []

    def choose(self, number: int, scores: torch.Tensor, freely: Callable[[], Choice]) -> Choice:
        """What the router of this number would choose anyway."""
        values, experts = freely()
        self._of_layers.append(experts.to(torch.int32))
        return values, experts

    def whole(self) -> torch.Tensor:
        """[T, layers, k] of the row as it is; on every rank that shares it."""
        return self._layout.whole(torch.stack(self._of_layers, 1))


class Given:
    """Experts to which a row's tokens must go; padding goes to the first ones."""

    def __init__(self, experts: torch.Tensor, layout: Layout) -> None:
        """The row's own [T, layers, k]."""
        layers, k = experts.shape[1:]
        padding = torch.arange(k, device=layout.at.device).repeat(layers, 1)
        self._experts = layout.local(experts.to(padding), padding)

    def choose(self, number: int, scores: torch.Tensor, freely: Callable[[], Choice]) -> Choice:
        """What the router of this number chose before the updates, with its present scores [P, experts]."""
        experts = self._experts[:, number]
        return scores.gather(1, experts), experts


class _Router:
    """What the router of a layer asks for experts."""

    def __init__(self, layer: TransformerLayer, number: int) -> None:
        self._number = number
        self._experts: Noted | Given | None = None
        layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        layer.mlp.router.router_replay = self

    def _enter(self, layer: TransformerLayer, args: Any, kwargs: dict[str, Any]) -> None:
        """The layer computes a row, for the first time or again."""
        self._experts = kwargs["packed_seq_params"].experts

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        freely: Callable[..., Any],
    ) -> Choice:
        """Megatron's call, in place of `freely(scores, topk, num_groups, group_topk)`."""

        def as_usual() -> Choice:
            values, experts = freely(scores, topk, num_groups, group_topk)
            return values, experts

        return as_usual() if self._experts is None else self._experts.choose(self._number, scores, as_usual)
