"""Training state in Megatron's torch_dist format, which any other parallel layout can load."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

from slime_core.errors import CheckpointError
from slime_core.training.megatron.critic import Critic
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


@dataclass(frozen=True)
class State:
    """What of a trainer is in a checkpoint."""

    policy: MegatronModel
    optimizer: Optimizer | None = None
    """None: the weights alone."""
    reference: MegatronModel | None = None
    """Where it is not that of the options any more."""
    critic: Critic | None = None


def save(state: State, world: Ranks, source: Path, directory: Path) -> None:
    """Write the state of all ranks; every rank must call it.

    Args:
        state: of this rank.
        world: all ranks.
        source: directory whose config and tokenizer are copied, so that `slime convert` needs no other.
        directory: to write.

    Raises:
        CheckpointError: when it cannot be written.
    """
    # by default Megatron starts a process just for this queue, which outlives a rank that is killed
    filesystem_async._results_queue = SimpleQueue()
    try:
        if world.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
        world.gather({})  # the directory is there
        dist_checkpointing.save(_contents(state, is_loading=False), str(directory))
        if world.rank == 0:
            copy_files(source, directory, DESCRIPTION)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {directory} cannot be written: {error}") from error


def load(state: State, directory: Path) -> None:
    """Go on from what `save` wrote, whatever its layout; every rank must call it.

    Raises:
        CheckpointError: when there is none, or it is of another architecture, or lacks the critic.
    """
    if not dist_checkpointing.check_is_distributed_checkpoint(str(directory)):
        raise CheckpointError(f"{directory} is no checkpoint in Megatron's torch_dist format.")
    saved = dist_checkpointing.load_common_state_dict(str(directory))
    _check_identity(saved.get("architecture"), state.policy, directory, "--model")
    if state.critic is not None:
        if saved.get("critic_architecture") is None:
            raise CheckpointError(f"the checkpoint {directory} has no critic; resume with the options of the run.")
        _check_identity(saved["critic_architecture"], state.critic.model, directory, "--critic-model")
    if not saved["has_reference"]:
        state = replace(state, reference=None)  # it was not renewed: that of the options is still right
    try:
        found = dist_checkpointing.load(_contents(state, is_loading=True), str(directory))
    except (CheckpointingException, RuntimeError, KeyError, OSError) as error:
        raise CheckpointError(
            f"the checkpoint {directory} cannot be loaded: {type(error).__name__}: {error}; resume with the options of "
            "the run."
        ) from None
    state.policy.bare.load_state_dict(found["model"])
    if state.optimizer is not None:
        state.optimizer.load_state(found["optimizer"], saved["steps"])
    if state.reference is not None:
        state.reference.bare.load_state_dict(found["reference"])
    if state.critic is not None:
        state.critic.model.bare.load_state_dict(found["critic"]["model"])
        state.critic.optimizer.load_state(found["critic"]["optimizer"], saved["critic_steps"])


def _contents(state: State, *, is_loading: bool) -> dict[str, Any]:
    contents: dict[str, Any] = {
        "architecture": _identity(state.policy),
        "has_reference": state.reference is not None,
        "steps": 0 if state.optimizer is None else state.optimizer.steps,
        **_trained(state.policy, state.optimizer, is_loading),
    }
    if state.reference is not None:
        contents["reference"] = state.reference.bare.sharded_state_dict()
        add_prefix_for_sharding(contents["reference"], "reference.")
    if state.critic is not None:
        contents["critic_architecture"] = _identity(state.critic.model)
        contents["critic_steps"] = state.critic.optimizer.steps
        contents["critic"] = _trained(state.critic.model, state.critic.optimizer, is_loading)
        add_prefix_for_sharding(contents["critic"], "critic.")
    return contents


def _trained(model: MegatronModel, optimizer: Optimizer | None, is_loading: bool) -> dict[str, Any]:
    """A model and what its optimiser holds."""
    own = model.bare.sharded_state_dict()
    if optimizer is None:
        return {"model": own}
    optimizer.prime()
    moments = optimizer.megatron.sharded_state_dict(own, is_loading=is_loading, metadata=SHARDING)
    return {"model": own, "optimizer": moments}


def _check_identity(saved: dict[str, Any] | None, model: MegatronModel, directory: Path, flag: str) -> None:
    own, theirs = _identity(model), saved or {}
    differs = ", ".join(f"{key} {theirs.get(key)} for {own[key]}" for key in own if theirs.get(key) != own[key])
    if differs:
        raise CheckpointError(f"the checkpoint {directory} is of another architecture than {flag}: {differs}.")


def _identity(model: MegatronModel) -> dict[str, Any]:
    return {key: getattr(model.hf, key, None) for key in IDENTITY}
