"""Weights between the Hugging Face format and Megatron's shards, parameter by parameter, by the family's rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from slime_core.errors import CheckpointError, OptionError
from slime_core.training.megatron.hugging_face import HuggingFaceWeights
from slime_core.training.megatron.model import MegatronModel
from slime_core.training.megatron.rules import Rule
from slime_core.training.ranks import Ranks

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

TRANSFORMER_ENGINE = (
    (r"(.*)\.self_attention\.linear_qkv\.layer_norm_weight", r"\1.input_layernorm.weight"),
    (r"(.*)\.mlp\.linear_fc1\.layer_norm_weight", r"\1.pre_mlp_layernorm.weight"),
    (r"(.*\.experts)\.(linear_fc\d)\.weight(\d+)", r"\1.\3.\2.weight"),
)
"""Where Transformer-Engine's modules keep what the portable ones call otherwise."""


@dataclass(frozen=True)
class Part:
    """A parameter's shard on this rank."""

    name: str
    """In the whole model, as the rules call it: with the numbers of layer and expert there."""
    tensor: torch.Tensor
    rule: Rule
    names: tuple[str, ...]
    """The Hugging Face tensors."""

    @property
    def is_expert(self) -> bool:
        """Whether expert parallelism cuts the model here."""
        return ".experts." in self.name


def parts(model: MegatronModel) -> list[Part]:
    """This rank's parameters, but for a critic's head.

    Raises:
        OptionError: when the family has no rule for one.
    """
    first_layer = get_transformer_layer_offset(model.config)
    num_experts = model.config.num_moe_experts or 0
    first_expert = (
        num_experts
        // parallel_state.get_expert_model_parallel_world_size()
        * (parallel_state.get_expert_model_parallel_rank())
    )
    found = []
    for own, tensor in model.bare.named_parameters():
        if model.is_critic and own.startswith("output_layer."):
            continue
        name = _global_name(own, first_layer, first_expert)
        rule, numbers = _rule_of(model, name)
        names = tuple(hf.format(**numbers) for hf in rule.hugging_face)
        if name == OUTPUT and model.tied:
            names = _rule_of(model, EMBEDDING)[0].hugging_face
        found.append(Part(name, tensor, rule, names))
    return found


def _global_name(name: str, first_layer: int, first_expert: int) -> str:
    """The parameter's name with the numbers of layer and expert in the whole model."""
    for pattern, plain in TRANSFORMER_ENGINE:
        name = re.sub(pattern, plain, name)
    name = name.replace(".experts.local_experts.", ".experts.")
    name = re.sub(r"(layers\.)(\d+)", lambda m: f"{m[1]}{int(m[2]) + first_layer}", name, count=1)
    return re.sub(r"(\.experts\.)(\d+)", lambda m: f"{m[1]}{int(m[2]) + first_expert}", name)


def _rule_of(model: MegatronModel, name: str) -> tuple[Rule, dict[str, str]]:
    for rule in model.family.rules:
        numbers = rule.match(name)
        if numbers is not None:
            return rule, numbers
    raise OptionError(f"the rules for models of type '{model.hf.model_type}' lack Megatron's parameter {name}.")


def _tensor_parallel(part: Part) -> dist.ProcessGroup:
    if part.is_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


# --- from Hugging Face ------------------------------------------------------------------------------------------------
@torch.no_grad()
def load_weights(model: MegatronModel, directory: Path) -> None:
    """Fill this rank's parameters from a Hugging Face directory.

    Raises:
        CheckpointError: when a tensor is missing or has another shape.
    """
    source = HuggingFaceWeights(directory)
    for part in parts(model):
        group = _tensor_parallel(part)
        tensors = [source.read(name) for name in part.names]
        try:
            shard = part.rule.layout.shard(tensors, group.rank(), group.size(), model.dims)
            fits = shard.shape == part.tensor.shape
        except RuntimeError:  # a reshape that the sizes do not allow
            fits = False
        if not fits:
            shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise CheckpointError(
                f"{', '.join(part.names)} of {directory} with shape {shapes} cannot fill Megatron's {part.name}; the "
                "weights are of another architecture than the configuration."
            )
        part.tensor.copy_(shard)


# --- to Hugging Face --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Whole:
    """A parameter of the whole model, and which ranks have it."""

    name: str
    rule: Rule
    names: tuple[str, ...]
    """The Hugging Face tensors."""
    shapes: tuple[tuple[int, ...], ...]
    """Theirs."""
    stage: int
    """Rank in the pipeline-parallel group."""
    expert_rank: int
    """Rank in the expert-parallel group; 0 for what every rank has."""


def weight_map(model: MegatronModel, world: Ranks) -> list[Whole]:
    """All parameters of the whole model, layer after layer; every rank must call it, once is enough.

    A tied output layer is left out: it is the embedding.
    """
    shapes: dict[str, list[list[int]]] = {}
    for part in parts(model):
        shard = part.tensor.detach().to("meta")
        whole = part.rule.layout.whole([shard] * _tensor_parallel(part).size(), model.dims)
        shapes[part.name] = [list(tensor.shape) for tensor in whole]
    place = {
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "expert_rank": parallel_state.get_expert_model_parallel_rank(),
    }
    found: dict[str, Whole] = {}
    for message in world.gather(place | {"shapes": shapes}):
        for name, its_shapes in message["shapes"].items():
            rule, numbers = _rule_of(model, name)
            names = tuple(hf.format(**numbers) for hf in rule.hugging_face)
            expert_rank = message["expert_rank"] if ".experts." in name else 0
            entry = Whole(name, rule, names, tuple(map(tuple, its_shapes)), message["stage"], expert_rank)
            found.setdefault(name, entry)
    if model.tied:
        found.pop(OUTPUT, None)
    return sorted(found.values(), key=lambda whole: _place(whole.name))


def _place(name: str) -> tuple[int, list[int]]:
    """Embedding, layers by their numbers, the rest."""
    stage = 0 if name == EMBEDDING else 1 if ".layers." in name else 2
    return stage, [int(piece) if piece.isdigit() else -1 for piece in name.split(".")]


@torch.no_grad()
def named_weights(model: MegatronModel, wholes: list[Whole], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole model's tensors under Hugging Face names, one parameter gathered at a time; every rank must go along.

    Every rank gets the same tensors in the same order, floating-point ones as `dtype`.
    """
    mine = {part.name: part for part in parts(model)}
    pipeline, experts = (
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_expert_model_parallel_group(),
    )
    for whole in wholes:
        part = mine.get(whole.name)
        tensors = [] if part is None else _joined(part, model, dtype)
        if ".experts." in whole.name and pipeline.rank() == whole.stage:
            tensors = _from(whole.expert_rank, tensors, whole, experts, model.device, dtype)
        tensors = _from(whole.stage, tensors, whole, pipeline, model.device, dtype)
        yield from zip(whole.names, tensors, strict=True)


def _joined(part: Part, model: MegatronModel, dtype: torch.dtype) -> list[torch.Tensor]:
    """The Hugging Face tensors of a parameter, from its tensor-parallel ranks."""
    group = _tensor_parallel(part)
    shard = part.tensor.detach().contiguous()
    shards = [shard]
    if group.size() > 1:
        shards = [torch.empty_like(shard) for _ in range(group.size())]
        dist.all_gather(shards, shard, group=group)
    return [tensor.to(dtype).contiguous() for tensor in part.rule.layout.whole(shards, model.dims)]


def _from(
    owner: int,
    tensors: list[torch.Tensor],
    whole: Whole,
    group: dist.ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """The tensors of one rank of the group, on every rank of it."""
    if group.size() == 1:
        return tensors
    if group.rank() != owner:
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape in whole.shapes]
    for tensor in tensors:
        dist.broadcast(tensor, dist.get_global_rank(group, owner), group=group)
    return tensors
