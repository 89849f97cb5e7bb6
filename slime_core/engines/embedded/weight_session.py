"""A weight update in parts: begun, received by broadcast into memory beside the model, swapped in whole at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from slime_core.engines.embedded.weights import WeightUpdateError
from slime_core.engines.weight_group import WeightGroup, in_daemon_thread, meet_at

GROUP_TIMEOUT_S = 1800.0
"""A broadcast that takes longer has no sender any more."""
OUTSIDE = "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


class WeightSession:
    """The groups this engine is a member of, and the update under way, if there is one."""

    def __init__(self) -> None:
        self._groups: dict[str, WeightGroup] = {}
        self._staged: dict[str, torch.Tensor] | None = None
        self._version: str | None = None

    async def join(self, address: str, port: int, rank: int, size: int, name: str, backend: str) -> None:
        """Become a member of a group; raises WeightUpdateError when that fails."""
        if backend != "gloo":
            raise WeightUpdateError(f"the embedded engine computes on the CPU and knows no {backend}; use gloo")
        if name in self._groups:
            raise WeightUpdateError(f"the group {name!r} exists already")

        def meet() -> WeightGroup:
            return WeightGroup(meet_at(address, port, size), name, rank, size, backend, GROUP_TIMEOUT_S)

        try:
            self._groups[name] = await in_daemon_thread(meet)
        except (RuntimeError, ValueError) as error:
            raise WeightUpdateError(f"Failed to initialize custom process group: {error}") from error

    def leave(self, name: str) -> None:
        """Leave a group; raises WeightUpdateError for one that it is no member of."""
        if name not in self._groups:
            raise WeightUpdateError("The group to be destroyed does not exist.")
        self._groups.pop(name).leave()

    def begin(self) -> None:
        """Open the update; raises WeightUpdateError while another is open."""
        if self._staged is not None:
            raise WeightUpdateError("a weight-update session is already open; call end_weight_update() first")
        self._staged, self._version = {}, None

    async def receive(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], group: str, flat: bool
    ) -> None:
        """Take part in the broadcast of these tensors, one by one or as one flat one; the model is not touched yet.

        Raises:
            WeightUpdateError: outside an update, for a group or a dtype it does not know, or a sender that is gone.
        """
        staged = self._staged
        if staged is None:
            raise WeightUpdateError(OUTSIDE)
        if group not in self._groups:
            raise WeightUpdateError(f"Group {group} is unknown; call init_weights_update_group first")
        if unknown := sorted(set(dtypes) - DTYPES.keys()):
            raise WeightUpdateError(f"the embedded engine holds no tensors of dtype {unknown[0]}")
        kinds = [DTYPES[dtype] for dtype in dtypes]
        if flat:
            sizes = [math.prod(shape) * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
            whole = torch.empty(sum(sizes), dtype=torch.uint8)
            parts = zip(torch.split(whole, sizes), kinds, shapes, strict=True)
            tensors, moved = [part.view(kind).view(*shape) for part, kind, shape in parts], [whole]
        else:
            tensors = [torch.empty(*shape, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True)]
            moved = tensors
        member = self._groups[group]
        try:
            await in_daemon_thread(lambda: member.broadcast(moved))
        except RuntimeError as error:
            self._groups.pop(group, None)  # its members are out of step from now on
            raise WeightUpdateError(f"Failed to receive weights: {error}") from error
        staged |= dict(zip(names, tensors, strict=True))

    def name_version(self, version: str | None) -> None:
        """What the weights will be called once they are in use."""
        self._version = version if version is not None else self._version

    def end(self) -> tuple[dict[str, torch.Tensor], str | None]:
        """Close the update: what it brought, and the version; raises WeightUpdateError when none is open."""
        if self._staged is None:
            raise WeightUpdateError("no weight-update session is open; call begin_weight_update() first")
        staged, self._staged = self._staged, None
        return staged, self._version
