"""The training state on disk: every rank writes its part as safetensors, any number of ranks reads them again.

torch.distributed.checkpoint does the work, with its safetensors storage: its own format would be a pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from slime_core.errors import CheckpointError
from slime_core.training.model_files import TRAINER
from slime_core.training.ranks import Ranks

Tensors = dict[str, torch.Tensor]


class StateWriter:
    """Writes the state of all ranks, at once or beside the training that goes on."""

    def __init__(self, ranks: Ranks, *, beside: bool) -> None:
        self._ranks, self._beside = ranks, beside
        # the writing thread's messages must not get between those of the training
        self._group: Any = dist.new_group(backend="gloo") if ranks.grouped else None
        self._writing: Future[Any] | None = None
        self._directory = Path()

    def save(self, tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
        """Write tensors to `directory/trainer`; each rank gives its own, and the parts that it has of sharded ones.

        Where it happens beside the training, this returns as soon as they are copied.

        Raises:
            CheckpointError: when they, or those of the last call, cannot be written.
        """
        self.finish()
        self._directory = directory
        target = directory / TRAINER
        writer = HuggingFaceStorageWriter(str(target), save_distributed=True)
        how: dict[str, Any] = {"storage_writer": writer, "process_group": self._group, "no_dist": self._group is None}

        def write() -> None:
            target.mkdir(parents=True, exist_ok=True)
            if self._beside:
                self._writing = dcp.async_save(dict(tensors), **how)
            else:
                dcp.save(dict(tensors), **how)

        _named(directory, write)

    def finished(self) -> bool:
        """Whether all is written.

        Raises:
            CheckpointError: when it cannot be.
        """
        if self._writing is None:
            return True
        if not self._writing.done():
            return False
        self.finish()
        return True

    def finish(self) -> None:
        """Wait until all is written.

        Raises:
            CheckpointError: when it cannot be.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            _named(self._directory, writing.result)


def load(tensors: Tensors, directory: Path, ranks: Ranks) -> None:
    """Read into these tensors what `StateWriter` wrote, from any number of ranks; each rank must call it.

    Raises:
        CheckpointError: when there is no such state, or one of other names or shapes.
    """
    saved = saved_shapes(directory)
    missing = [name for name in tensors if name not in saved]
    other = [name for name, tensor in tensors.items() if name in saved and saved[name] != tensor.shape]
    for name in (*missing[:1], *other[:1]):
        what = f"has the shape {list(saved[name])}" if name in saved else "is missing"
        raise CheckpointError(
            f"the training state in {directory} does not fit: {name} {what}; resume with the options of the run, "
            "--model and --optimizer among them."
        )
    reader = HuggingFaceStorageReader(str(directory / TRAINER))
    _named(directory, lambda: dcp.load(tensors, storage_reader=reader, no_dist=not ranks.grouped))


def saved_shapes(directory: Path) -> dict[str, torch.Size]:
    """The names in a state and their full shapes.

    Raises:
        CheckpointError: when there is none.
    """
    try:
        found = HuggingFaceStorageReader(str(directory / TRAINER)).read_metadata().state_dict_metadata
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the training state in {directory / TRAINER} cannot be read: {error}") from None
    if not found:
        raise CheckpointError(f"the checkpoint has no training state in {directory / TRAINER}.")
    return {name: meta.size for name, meta in found.items() if isinstance(meta, TensorStorageMetadata)}


def _named(directory: Path, act: Callable[[], Any]) -> None:
    """Do it; its failures tell where."""
    try:
        act()
    except (OSError, SafetensorError, CheckpointException) as error:
        failures = error.failures.values() if isinstance(error, CheckpointException) else []
        causes = [str(cause) for cause, _ in failures]
        raise CheckpointError(
            f"the checkpoint {directory} cannot be written or read: {'; '.join(causes) or error}"
        ) from error
