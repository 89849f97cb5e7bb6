"""`slime convert`: there and back changes no bit; what cannot be converted is refused."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from slime_core.errors import OptionError
from slime_core.training.megatron.command import convert

COMMANDS = """
import json, sys
from slime_core.cli import main

print(json.dumps([main(words) for words in json.loads(sys.argv[1])]))
"""
"""One process for all: its imports take longer than the conversions."""


def slime(*commands):
    """The exit codes of the commands, one after the other, and what they printed to stderr."""
    lines = json.dumps([[str(word) for word in words] for words in commands])
    ended = subprocess.run([sys.executable, "-c", COMMANDS, lines], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1]), ended.stderr


@pytest.fixture(scope="module")
def converted(models, tmp_path_factory):
    """Where a model went there and back, and where weights of another architecture should have gone."""
    root = tmp_path_factory.mktemp("converted")
    mixed = root / "mixed"
    mixed.mkdir()
    (mixed / "config.json").write_bytes((models["qwen3"] / "config.json").read_bytes())
    (mixed / "model.safetensors").write_bytes((models["llama"] / "model.safetensors").read_bytes())
    codes, errors = slime(
        ("convert", "--to", "torch_dist", models["qwen3_moe"], root / "there"),
        ("convert", "--to", "hf", root / "there", root / "back"),
        ("convert", "--to", "torch_dist", mixed, root / "out"),
    )
    return root, codes, errors


def test_a_model_comes_back_as_it_was(models, converted):
    root, codes, errors = converted
    assert codes[:2] == [0, 0], errors
    before, after = (load_file(path / "model.safetensors") for path in (models["qwen3_moe"], root / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    kept = {path.name for path in (root / "back").iterdir()}
    assert {"config.json", "tokenizer.json"} <= kept


def test_weights_of_another_architecture_are_refused(converted):
    _, codes, errors = converted
    assert codes[2] == 1
    assert "has no tensor model.layers.0.self_attn.q_norm.weight; it is of another architecture" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("to", "form"), [("hf", "a checkpoint of a Megatron run"), ("torch_dist", "a model directory")]
)
def test_a_source_of_the_wrong_kind_is_refused(to, form, tmp_path):
    with pytest.raises(OptionError, match=f"is not {form}"):
        convert(tmp_path, tmp_path / "out", to)


def test_nothing_is_overwritten(models, tmp_path):
    with pytest.raises(OptionError, match="exists; name a new directory"):
        convert(models["qwen3"], tmp_path, "torch_dist")
