"""Model directories: written in several files, read tensor by tensor, experts alone or in one."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slime_core.errors import CheckpointError
from slime_core.training.megatron.hugging_face import HuggingFaceWeights, save_hugging_face, stacked_experts


@pytest.mark.parametrize("file_bytes", [10_000, 10**9])
def test_transformers_reads_what_was_written(file_bytes, models, tmp_path):
    own = load_file(models["qwen3"] / "model.safetensors")
    save_hugging_face(own.items(), models["qwen3"], tmp_path / "out", writes=True, file_bytes=file_bytes)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 3) == (file_bytes == 10_000)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    again = HuggingFaceWeights(tmp_path / "out")
    for name, tensor in own.items():
        assert torch.equal(read[name], tensor)
        assert torch.equal(again.read(name), tensor)


def test_a_rank_that_does_not_write_reads_to_the_end(models, tmp_path):
    unread = iter([("a", torch.zeros(1)), ("b", torch.zeros(1))])
    save_hugging_face(unread, models["qwen3"], tmp_path / "out", writes=False)
    assert next(unread, None) is None
    assert not (tmp_path / "out").exists()


def test_experts_in_one_are_those_that_transformers_holds(models):
    own = load_file(models["qwen3_moe"] / "model.safetensors")
    held = AutoModelForCausalLM.from_pretrained(models["qwen3_moe"], dtype=torch.float32).state_dict()
    by_layer = sorted(own.items(), key=lambda item: "experts" in item[0])
    stacked = dict(stacked_experts(by_layer))
    assert stacked.keys() == held.keys()
    assert all(torch.equal(stacked[name], tensor) for name, tensor in held.items())


def test_an_expert_is_read_from_all_in_one(models, tmp_path):
    own = load_file(models["qwen3_moe"] / "model.safetensors")
    held = AutoModelForCausalLM.from_pretrained(models["qwen3_moe"], dtype=torch.float32).state_dict()
    save_file(dict(held), tmp_path / "model.safetensors")
    fused = HuggingFaceWeights(tmp_path)
    for name in own:
        assert torch.equal(fused.read(name), own[name])


def test_a_missing_tensor_is_named(models):
    with pytest.raises(CheckpointError, match=r"has no tensor model\.nothing\.weight; it is of another architecture"):
        HuggingFaceWeights(models["qwen3"]).read("model.nothing.weight")


def test_a_directory_without_safetensors_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        HuggingFaceWeights(tmp_path)
