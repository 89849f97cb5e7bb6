"""Reading, verifying and swapping weights: what is refused, and that a refusal changes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slime_core.engines.checksum import model_checksums, tensor_checksum
from slime_core.engines.embedded.engine import Engine
from slime_core.engines.embedded.request import SamplingParams
from slime_core.engines.embedded.weights import CHECKSUM_KEY, WeightUpdateError, read_checkpoint

Tensors = dict[str, torch.Tensor]
EMBEDDING = "model.embed_tokens.weight"


def write(directory: Path, tensors: Tensors, checksums: bool = True) -> Path:
    """Write a checkpoint as a trainer does, with its checksums in the header."""
    directory.mkdir(exist_ok=True)
    metadata = {"format": "pt"}
    if checksums:
        metadata[CHECKSUM_KEY] = json.dumps({name: tensor_checksum(tensor) for name, tensor in tensors.items()})
    save_file(tensors, directory / "model.safetensors", metadata=metadata)
    return directory


def flip_a_byte(directory: Path) -> None:
    file = directory / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 0xFF
    file.write_bytes(content)


def truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def drop(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def change(name: str, new: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: new(tensors[name]).contiguous()}


@pytest.mark.parametrize(
    ("edit", "damage", "message"),
    [
        (None, flip_a_byte, "does not match its checksum"),
        (None, truncate, "cannot be read"),
        (None, lambda directory: (directory / "model.safetensors").unlink(), "has neither"),
        (drop("model.norm.weight"), None, r"lacks tensors: model\.norm\.weight"),
        (lambda tensors: tensors | {"model.extra": torch.ones(2)}, None, r"no tensors named model\.extra"),
        (change("model.norm.weight", lambda tensor: tensor[:-1]), None, "has shape"),
        (change("model.norm.weight", torch.Tensor.bfloat16), None, "has dtype torch.bfloat16"),
        (lambda tensors: tensors | {"lm_head.weight": tensors[EMBEDDING] + 1}, None, "tied"),
    ],
    ids=["corrupted", "truncated", "missing", "a name less", "a name more", "shape", "dtype", "untied"],
)
def test_a_bad_checkpoint_is_refused_and_the_old_weights_stay(
    engine: Engine,
    other_model_dir: Path,
    tmp_path: Path,
    edit: Callable[[Tensors], Tensors] | None,
    damage: Callable[[Path], None] | None,
    message: str,
) -> None:
    greedy = SamplingParams(max_new_tokens=10, temperature=0.0, ignore_eos=True)
    before, checksums = engine.generate([[1, 2, 3]], greedy)[0], engine.checksums().result()
    tensors = load_file(other_model_dir / "model.safetensors")
    directory = write(tmp_path / "update", edit(tensors) if edit else tensors)
    if damage:
        damage(directory)
    with pytest.raises(WeightUpdateError, match=message):
        engine.update_weights(str(directory), "new").result()
    assert engine.checksums().result() == checksums
    assert engine.weight_version == "default"
    after = engine.generate([[1, 2, 3]], greedy)[0]
    assert (after.output_ids, after.output_logprobs) == (before.output_ids, before.output_logprobs)


def test_a_good_update_is_bit_exact(engine: Engine, other_model_dir: Path, tmp_path: Path) -> None:
    directory = write(tmp_path / "update", load_file(other_model_dir / "model.safetensors"))
    engine.update_weights(str(directory), "new").result()
    source = AutoModelForCausalLM.from_pretrained(other_model_dir)
    assert engine.checksums().result() == model_checksums(source.state_dict())
    assert engine.weight_version == "new"


def test_a_sharded_checkpoint_is_read_whole(model_dir: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tensors = read_checkpoint(tmp_path)
    assert {name: tensor_checksum(tensor) for name, tensor in tensors.items()} == model_checksums(model.state_dict())


def test_a_lost_shard_is_noticed(model_dir: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(model_dir).save_pretrained(tmp_path, max_shard_size="100KB")
    next(iter(sorted(tmp_path.glob("*.safetensors")))).unlink()
    with pytest.raises(WeightUpdateError, match="is missing although"):
        read_checkpoint(tmp_path)


def test_mapped_weights_outlive_their_file(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path / "copy")
    tensors = read_checkpoint(tmp_path / "copy")
    checksum = tensor_checksum(tensors[EMBEDDING])
    shutil.rmtree(tmp_path / "copy")
    assert tensor_checksum(tensors[EMBEDDING]) == checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_checksum_sees_every_bit_and_not_the_strides(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    assert tensor_checksum(tensor) == tensor_checksum(tensor.t().contiguous().t())
    changed = tensor.clone()
    changed[1, 2] += 1
    assert tensor_checksum(changed) != tensor_checksum(tensor)
    assert len(tensor_checksum(torch.zeros(0, dtype=dtype))) == 32


def test_a_tied_head_is_left_out_whether_it_shares_memory_or_not() -> None:
    embedding = torch.randn(4, 3)
    shared = model_checksums({EMBEDDING: embedding, "lm_head.weight": embedding})
    copied = model_checksums([("lm_head.weight", embedding.clone()), (EMBEDDING, embedding)])
    assert shared == copied == {EMBEDDING: tensor_checksum(embedding)}
    assert "lm_head.weight" in model_checksums({EMBEDDING: embedding, "lm_head.weight": embedding + 1})
