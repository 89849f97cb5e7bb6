"""Routing replay: in an update a token goes to the experts that it went to before the round's first update.

Zheng et al., "Group Sequence Policy Optimization" (arXiv 2507.18071), section 5.3: else a small update may send a token
to other experts, and the ratio of its probabilities says nothing about the policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from slime_core.errors import OptionError
from slime_core.training.torch_backend.model import Policy, padded_places
from slime_core.types import IntArray

TOPK = (torch.topk, torch.Tensor.topk)
"""With what every router of transformers chooses experts, from scores [tokens, experts]."""


class RoutingReplay:
    """Remembers the experts of a round's samples, and makes a policy choose them again."""

    def __init__(self, policy: Policy) -> None:
        """Find the policy's routers; every rank must call it.

        Raises:
            OptionError: when it has none.
        """
        self._policy = policy
        self._routers = [_Choices(router) for router in routers(policy)]
        if not self._routers:
            raise OptionError(f"--routing-replay: a {type(policy.model).__name__} has no experts to choose from.")
        self._experts: dict[int, list[torch.Tensor]] = {}
        """Row -> [tokens, k] for every choice of every router, on the CPU."""

    def forget(self) -> None:
        """A new round begins."""
        self._experts = {}

    @contextmanager
    def recorded(self, rows: IntArray, lengths: IntArray) -> Iterator[None]:
        """Remember what the policy chooses within, for a micro-batch of these rows [S] of these lengths [S]."""
        for router in self._routers:
            router.listen()
        try:
            yield
        finally:
            chosen = [experts for router in self._routers for experts in router.dismiss()]
        places = self._places(lengths)
        split = [experts[places].to("cpu", torch.int32).split(lengths.tolist()) for experts in chosen]
        for row, *of_row in zip(rows.tolist(), *split, strict=True):
            self._experts[row] = of_row

    @contextmanager
    def replayed(self, rows: IntArray, lengths: IntArray) -> Iterator[None]:
        """Let the policy choose the same again within, backward pass included."""
        of_rows = [self._experts[row] for row in rows.tolist()]
        places = self._places(lengths)
        choices = [self._laid_out(torch.cat(parts), places, lengths) for parts in zip(*of_rows, strict=True)]
        per_router = len(choices) // len(self._routers)
        for number, router in enumerate(self._routers):
            router.dictate(choices[number * per_router : (number + 1) * per_router])
        try:
            yield
        finally:
            for router in self._routers:
                router.dismiss()

    def _places(self, lengths: IntArray) -> torch.Tensor:
        """[T] where each token is among those that routers see."""
        if self._policy.packs:
            return torch.arange(int(lengths.sum()), device=self._policy.device)
        return padded_places(lengths, self._policy.device)

    def _laid_out(self, experts: torch.Tensor, places: torch.Tensor, lengths: IntArray) -> torch.Tensor:
        """[T, k] as routers see them; padding goes to the first experts."""
        size = len(experts) if self._policy.packs else len(lengths) * int(lengths.max())
        whole = torch.arange(experts.shape[1], device=places.device).repeat(size, 1)
        return whole.index_copy(0, places, experts.to(places.device, torch.int64))


class _Choices(TorchFunctionMode):
    """Around one router's forward, and its recomputation: listens to its choices, or dictates them."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self._heard: list[torch.Tensor] | None = None
        self._dictated: Sequence[torch.Tensor] = ()
        self._number = 0
        router.register_forward_pre_hook(self._enter)
        router.register_forward_hook(self._leave, always_call=True)

    def listen(self) -> None:
        """Note the choices from now on."""
        self._heard = []

    def dictate(self, choices: Sequence[torch.Tensor]) -> None:
        """Make these the choices of each forward from now on."""
        self._dictated = choices

    def dismiss(self) -> list[torch.Tensor]:
        """Leave the router to itself; what it chose meanwhile."""
        heard, self._heard, self._dictated = self._heard, None, ()
        return heard or []

    def _enter(self, *_: Any) -> None:
        self._number = 0
        self.__enter__()

    def _leave(self, *_: Any) -> None:
        self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not _chooses(func, args):
            return found
        if self._heard is not None:
            self._heard.append(found.indices)
        elif self._dictated:
            experts = self._dictated[self._number]
            self._number += 1
            return torch.return_types.topk((args[0].gather(-1, experts), experts))
        return found


def routers(policy: Policy) -> list[nn.Module]:
    """The modules of a policy that choose experts for tokens, in the order in which a token comes by."""
    inside: list[nn.Module] = []
    found: dict[nn.Module, None] = {}

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if _chooses(func, args):
                found[inside[-1]] = None
            return func(*args, **(kwargs or {}))

    def enter(module: nn.Module, _: Any) -> None:
        inside.append(module)

    def leave(*_: Any) -> None:
        inside.pop()

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        with torch.no_grad(), Watch():
            policy.idle()
    finally:
        for hook in hooks:
            hook.remove()
    return list(found)


def _chooses(func: Any, args: Any) -> bool:
    return func in TOPK and args[0].ndim == 2
