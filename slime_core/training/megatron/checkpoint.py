"""Training state in Megatron's torch_dist format, which any other parallel layout can load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException

from slime_core.errors import CheckpointError
from slime_core.training.megatron.model import MegatronModel
from slime_core.training.megatron.optimizer import Optimizer
from slime_core.training.model_files import DESCRIPTION, copy_files
from slime_core.training.ranks import Ranks

SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}
"""Of the optimiser: by parameter, so that a run can resume with other parallel sizes."""

IDENTITY = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "vocab_size",
    "tie_word_embeddings",
)
"""What of a configuration a checkpoint must share with the model."""


def save(
    model: MegatronModel,
    optimizer: Optimizer | None,
    reference: MegatronModel | None,
    world: Ranks,
    source: Path,
    directory: Path,
) -> None:
    """Write the state of all ranks; every rank must call it.

    Args:
        model: the policy.
        optimizer: None for the weights alone.
        reference: where it is not that of the options any more.
        world: all ranks.
        source: directory whose config and tokenizer are copied, so that `slime convert` needs no other.
        directory: to write.

    Raises:
        CheckpointError: when it cannot be written.
    """
    try:
        if world.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
        world.gather({})  # the directory is there
        if optimizer is not None:
            optimizer.prime()
        dist_checkpointing.save(_state(model, optimizer, reference, is_loading=False), str(directory))
        if world.rank == 0:
            copy_files(source, directory, DESCRIPTION)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {directory} cannot be written: {error}") from error


def load(model: MegatronModel, optimizer: Optimizer | None, reference: MegatronModel | None, directory: Path) -> None:
    """Go on from what `save` wrote, whatever its layout; every rank must call it.

    Raises:
        CheckpointError: when there is none, or it is of another architecture.
    """
    if not dist_checkpointing.check_is_distributed_checkpoint(str(directory)):
        raise CheckpointError(f"{directory} is no checkpoint in Megatron's torch_dist format.")
    saved = dist_checkpointing.load_common_state_dict(str(directory))
    own = _identity(model)
    if saved.get("architecture") != own:
        theirs = saved.get("architecture") or {}
        differs = ", ".join(f"{key} {theirs.get(key)} for {own[key]}" for key in own if theirs.get(key) != own[key])
        raise CheckpointError(f"the checkpoint {directory} is of another architecture than --model: {differs}.")
    if reference is not None and not saved["has_reference"]:
        reference = None  # it was not renewed: that of the options is still right
    if optimizer is not None:
        optimizer.prime()
    try:
        state = dist_checkpointing.load(_state(model, optimizer, reference, is_loading=True), str(directory))
    except (CheckpointingException, RuntimeError, KeyError, OSError) as error:
        raise CheckpointError(
            f"the checkpoint {directory} cannot be loaded: {type(error).__name__}: {error}; resume with the options of "
            "the run."
        ) from None
    model.policy.load_state_dict(state["model"])
    if reference is not None:
        reference.policy.load_state_dict(state["reference"])
    if optimizer is not None:
        optimizer.load_state(state["optimizer"], saved["steps"])


def _state(
    model: MegatronModel, optimizer: Optimizer | None, reference: MegatronModel | None, *, is_loading: bool
) -> dict[str, Any]:
    own = model.policy.sharded_state_dict()
    state: dict[str, Any] = {
        "architecture": _identity(model),
        "has_reference": reference is not None,
        "model": own,
        "steps": 0 if optimizer is None else optimizer.steps,
    }
    if reference is not None:
        state["reference"] = reference.policy.sharded_state_dict(prefix="reference.")
    if optimizer is not None:
        state["optimizer"] = optimizer.megatron.sharded_state_dict(own, is_loading=is_loading, metadata=SHARDING)
    return state


def _identity(model: MegatronModel) -> dict[str, Any]:
    return {key: getattr(model.hf, key, None) for key in IDENTITY}
