"""`slime convert`: there and back changes no bit; what cannot be converted is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from slime_core.errors import OptionError
from slime_core.training.megatron.command import convert


def slime(*words):
    return subprocess.run(
        [sys.executable, "-c", "from slime_core.cli import main; raise SystemExit(main())", *map(str, words)],
        capture_output=True,
        text=True,
    )


def test_a_model_comes_back_as_it_was(models, tmp_path):
    there = slime("convert", "--to", "torch_dist", models["qwen3_moe"], tmp_path / "there")
    assert there.returncode == 0, there.stderr
    back = slime("convert", "--to", "hf", tmp_path / "there", tmp_path / "back")
    assert back.returncode == 0, back.stderr
    before, after = (load_file(path / "model.safetensors") for path in (models["qwen3_moe"], tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    kept = {path.name for path in (tmp_path / "back").iterdir()}
    assert {"config.json", "tokenizer.json"} <= kept


@pytest.mark.parametrize(
    ("to", "form"), [("hf", "a checkpoint of a Megatron run"), ("torch_dist", "a model directory")]
)
def test_a_source_of_the_wrong_kind_is_refused(to, form, tmp_path):
    with pytest.raises(OptionError, match=f"is not {form}"):
        convert(tmp_path, tmp_path / "out", to)


def test_nothing_is_overwritten(models, tmp_path):
    with pytest.raises(OptionError, match="exists; name a new directory"):
        convert(models["qwen3"], tmp_path, "torch_dist")


def test_weights_of_another_architecture_are_refused(models, tmp_path):
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "config.json").write_bytes((models["qwen3"] / "config.json").read_bytes())
    (mixed / "model.safetensors").write_bytes((models["llama"] / "model.safetensors").read_bytes())
    found = slime("convert", "--to", "torch_dist", mixed, tmp_path / "out")
    assert found.returncode == 1
    assert "has no tensor model.layers.0.self_attn.q_norm.weight; it is of another architecture" in found.stderr
    assert "Traceback" not in found.stderr
