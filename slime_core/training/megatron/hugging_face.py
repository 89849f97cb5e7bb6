"""Model directories in the Hugging Face format, read and written tensor by tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slime_core.errors import CheckpointError
from slime_core.training.model_files import DESCRIPTION, copy_files

FILE_BYTES = 5 * 2**30
"""Of one file, as in published models."""


class HuggingFaceWeights:
    """The safetensors files of a model directory, read tensor by tensor."""

    def __init__(self, directory: Path) -> None:
        """Find which file has which tensor.

        Raises:
            CheckpointError: when the directory has no safetensors files.
        """
        self._directory = directory
        index = directory / "model.safetensors.index.json"
        try:
            if index.is_file():
                files = json.loads(index.read_text())["weight_map"]
            else:
                with safe_open(directory / "model.safetensors", "pt") as file:
                    files = dict.fromkeys(file.keys(), "model.safetensors")
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(f"the weights of {directory} cannot be read as safetensors: {error}") from None
        self._files: dict[str, str] = files

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str) -> torch.Tensor:
        """One tensor.

        Raises:
            CheckpointError: when there is none of this name.
        """
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if name not in self._files and expert is not None and f"{expert[1]}.down_proj" in self._files:
            return self._read_fused(expert[1], int(expert[2]), expert[3])
        if name not in self._files:
            raise CheckpointError(f"{self._directory} has no tensor {name}; it is of another architecture.")
        with safe_open(self._directory / self._files[name], "pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def _read_fused(self, experts: str, number: int, which: str) -> torch.Tensor:
        """An expert's matrix from those of all in one."""
        name = f"{experts}.{'down_proj' if which == 'down' else 'gate_up_proj'}"
        with safe_open(self._directory / self._files[name], "pt") as file:
            both: torch.Tensor = file.get_slice(name)[number]
        return both if which == "down" else both.chunk(2)[which == "up"]


def save_hugging_face(
    tensors: Iterable[tuple[str, torch.Tensor]],
    source: Path,
    directory: Path,
    writes: bool,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write a directory that transformers loads, one file after the other.

    Args:
        tensors: by name; read to its end on every rank, as others may depend on it.
        source: directory whose config and tokenizer are copied.
        directory: to write.
        writes: whether this rank is the one that writes.
        file_bytes: of the tensors in one file, at most; a larger tensor is alone in its own.

    Raises:
        CheckpointError: when it cannot be written.
    """
    shard: dict[str, torch.Tensor] = {}
    files: list[Path] = []
    names: dict[str, int] = {}
    size = total = 0
    try:
        for name, tensor in tensors:
            if not writes:
                continue
            if shard and size + tensor.nbytes > file_bytes:
                files.append(_write(shard, directory, len(files)))
                shard, size = {}, 0
            # the gathered tensor may be a view of a larger one
            shard[name] = tensor.to("cpu", copy=True)
            names[name] = len(files)
            size += tensor.nbytes
            total += tensor.nbytes
        if writes:
            files.append(_write(shard, directory, len(files)))
            _name_files(files, names, total)
            copy_files(source, directory, DESCRIPTION)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the model cannot be written to {directory}: {error}") from error


def _write(shard: dict[str, torch.Tensor], directory: Path, number: int) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"part-{number}.safetensors"
    save_file(shard, path, {"format": "pt"})
    return path


def _name_files(files: list[Path], names: dict[str, int], total_bytes: int) -> None:
    """Give the files the names that transformers looks for, now that their number is known."""
    if len(files) == 1:
        files[0].rename(files[0].with_name("model.safetensors"))
        return
    final = [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    for path, name in zip(files, final, strict=True):
        path.rename(path.with_name(name))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": {name: final[n] for name, n in names.items()}}
    files[0].with_name("model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def stacked_experts(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors with the experts of a layer in one, as transformers 5 holds them in memory.

    Args:
        tensors: by name; the experts of a layer come one after the other.
    """
    waiting: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors:
        found = re.fullmatch(r"(.*\.experts)\.\d+\.(gate|up|down)_proj\.weight", name)
        if found is None or (waiting and not any(held.startswith(f"{found[1]}.") for held in waiting)):
            yield from _stacked(waiting)
            waiting = {}
        if found is None:
            yield name, tensor
        else:
            waiting.setdefault(f"{found[1]}.{found[2]}", []).append(tensor)
    yield from _stacked(waiting)


def _stacked(experts: dict[str, list[torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parts in experts.items():
        prefix, _, which = name.rpartition(".")
        if which == "down":
            yield f"{prefix}.down_proj", torch.stack(parts)
        elif which == "gate":
            pairs = zip(parts, experts[f"{prefix}.up"], strict=True)
            yield f"{prefix}.gate_up_proj", torch.stack([torch.cat(pair) for pair in pairs])
