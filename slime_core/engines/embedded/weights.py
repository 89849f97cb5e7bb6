"""Replace the weights of a live model from safetensors files: read everything, verify everything, then swap.

Whatever is wrong with the files, the old weights stay in use untouched.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from slime_core.engines.checksum import tensor_checksums
from slime_core.engines.embedded.mapped_file import MappedFile

CHECKSUM_KEY = "slime_checksums"  # header metadata of a file: JSON {tensor name: checksum}
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class WeightUpdateError(ValueError):
    """Weights that were refused; the message says which file or tensor and why."""


def read_checkpoint(path: str | Path, mapped: MappedFile | None = None) -> dict[str, torch.Tensor]:
    """Map a checkpoint directory, {name: tensor}, verifying checksums where its files carry them.

    The files may be removed at any time, but must not be written to while the tensors are in use.
    Both a single model.safetensors and shards with an index are understood. Raises WeightUpdateError.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise WeightUpdateError(f"{path} is not a directory")
    files, expected = _checkpoint_files(directory)
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        for name, tensor in _read_file(file, mapped or MappedFile()).items():
            if name in tensors:
                raise WeightUpdateError(f"tensor {name!r} is in more than one file of {path}")
            tensors[name] = tensor
    if expected is not None and (missing := sorted(expected - tensors.keys())):
        raise WeightUpdateError(f"{INDEX_FILE} lists tensors that its files lack: {_some(missing)}")
    return tensors


def _checkpoint_files(directory: Path) -> tuple[list[Path], set[str] | None]:
    """The files of a checkpoint, and the tensor names its index promises (None without an index)."""
    index, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if not index.is_file():
        if not single.is_file():
            raise WeightUpdateError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")
        return [single], None
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        names = sorted(set(weight_map.values()))
        files = [directory / Path(name).name for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightUpdateError(f"{index} cannot be read: {error!r}") from error
    for file in files:
        if not file.is_file():
            raise WeightUpdateError(f"{file} is missing although {INDEX_FILE} lists it")
    return files, set(weight_map)


def _read_file(file: Path, mapped: MappedFile) -> dict[str, torch.Tensor]:
    try:
        tensors, metadata = mapped.read(file)
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise WeightUpdateError(f"{file} cannot be read: {error}") from error
    if CHECKSUM_KEY in metadata:
        _verify(file, tensors, metadata[CHECKSUM_KEY])
    return tensors


def _verify(file: Path, tensors: dict[str, torch.Tensor], stated: str) -> None:
    try:
        checksums: dict[str, Any] = dict(json.loads(stated))
    except (ValueError, TypeError) as error:
        raise WeightUpdateError(f"the {CHECKSUM_KEY} of {file} are not a JSON object") from error
    for name, checksum in zip(tensors, tensor_checksums(tensors.values()), strict=True):
        if name not in checksums:
            raise WeightUpdateError(f"{file} is corrupted: tensor {name!r} has no checksum")
        if checksum != checksums[name]:
            raise WeightUpdateError(f"{file} is corrupted: tensor {name!r} does not match its checksum")


def match_to_model(tensors: dict[str, torch.Tensor], model: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair each of the model's own tensors with its replacement; raises WeightUpdateError on any difference.

    Names, shapes and dtypes must be the model's. Of several names for one tied tensor, one suffices; if more are given
    they must agree.
    """
    live = model.state_dict()
    if unknown := sorted(tensors.keys() - live.keys()):
        raise WeightUpdateError(f"the model has no tensors named {_some(unknown)}")
    for name, tensor in tensors.items():
        _check_alike(name, tensor, live[name])
    pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    missing: dict[str, int] = {}
    for name, target in live.items():
        place = target.data_ptr()
        if name not in tensors:
            missing[name] = place
        elif place in pairs and not torch.equal(pairs[place][1], tensors[name]):
            raise WeightUpdateError(f"tensor {name!r} is tied to another one in the model, but their values differ")
        else:
            pairs[place] = (target, tensors[name])
    if lacking := [name for name, place in missing.items() if place not in pairs]:
        raise WeightUpdateError(f"the checkpoint lacks tensors: {_some(sorted(lacking))}")
    return list(pairs.values())


def _check_alike(name: str, tensor: torch.Tensor, target: torch.Tensor) -> None:
    if tensor.shape != target.shape:
        raise WeightUpdateError(
            f"tensor {name!r} has shape {tuple(tensor.shape)}, the model's has {tuple(target.shape)}"
        )
    if tensor.dtype != target.dtype:
        raise WeightUpdateError(f"tensor {name!r} has dtype {tensor.dtype}, the engine holds {target.dtype}")


@torch.no_grad()
def swap(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the replacements into the live tensors, in place."""
    for target, replacement in pairs:
        target.copy_(replacement)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
