"""A model's weights on their way out: whole tensors under Hugging Face names, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from slime_core.errors import CheckpointError, WeightSyncError
from slime_core.training.model_files import FILES_BESIDE, copy_files, write_dtype
from slime_core.training.torch_backend.sharding import whole
from slime_core.training.torch_backend.trainable import ADAPTER, adapted


def named_weights(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors by its own names, contiguous, on its device, floating-point ones as `dtype`.

    One that shares another's memory (a tied output head) comes once, under its first name. Adapters are merged into
    what they stand beside. A tensor that is cut up is gathered when its turn comes, by all ranks, which must read to
    the end.
    """
    seen: set[object] = set()
    layers = adapted(model)
    for own_name, tensor in model.state_dict(keep_vars=True).items():
        if ".lora_" in own_name and layers:
            continue
        name = own_name.replace(".base_layer.", ".") if layers else own_name
        # every rank must see the same: an empty part of a sharded tensor has no address
        memory = id(tensor) if isinstance(tensor, DTensor) else (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and memory in seen:
            continue
        seen.add(memory)
        kept = dtype if tensor.is_floating_point() else tensor.dtype
        with torch.no_grad():
            merged = tensor + layers[name].get_delta_weight(ADAPTER) if name in layers else tensor.detach()
            # in the engines' dtype before it is gathered: half the bytes travel
            yield name, whole(merged.to(kept)).contiguous()


def published_weights(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """`named_weights` under the names and in the shapes of published files, which SGLang reads.

    transformers keeps the experts of a layer in one tensor, for example, where files have one for each.

    Raises:
        WeightSyncError: when transformers would join several tensors in one of the file.
    """
    seen: set[str] = set()
    for own_name, whole_tensor in named_weights(model, dtype):
        for name, tensor in revert_weight_conversion(model, {own_name: whole_tensor}).items():
            if name in seen:
                raise WeightSyncError(
                    f"files of a {type(model).__name__} have in one tensor, {name}, what transformers has in several, "
                    "so that it cannot be sent to SGLang; use --train-backend megatron, or --engine embedded."
                )
            seen.add(name)
            yield name, tensor.contiguous()


def write_model(model: PreTrainedModel, dtype: torch.dtype, source: Path, target: Path, *, writes: bool) -> None:
    """Write a directory that transformers loads: config, weights, and the tokenizer's files copied from `source`.

    Args:
        model: every rank that has a part of it must call this.
        dtype: of the weights.
        source: the directory that the model came from.
        target: is made.
        writes: whether this rank does; on the CPU it then has the whole model.

    Raises:
        CheckpointError: when it cannot be written.
    """
    weights = {}
    for name, tensor in named_weights(model, dtype):
        if writes:
            weights[name] = tensor.cpu()
    if not writes:
        return
    try:
        target.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(target, state_dict=weights)
        write_dtype(target, dtype)
        copy_files(source, target, FILES_BESIDE)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the model cannot be written to {target}: {error}") from error
