"""Weights cast to block-wise FP8: against a loop over blocks, against the checkpoint's own reader, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from slime_core.errors import OptionError, WeightSyncError
from slime_core.options import parse
from slime_core.weights.fp8 import SCALE, quantise, read_fp8
from slime_core.weights.sync import WeightSync
from weights.conftest import Exporter

ROOT = Path(__file__).parents[2]
FP8 = torch.float8_e4m3fn


def restored(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Every FP8 value times the scale of its block."""
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return values.float() * wide[: values.shape[0], : values.shape[1]]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.floats(1e-20, 1e20))
def test_every_block_is_scaled_to_the_range_of_fp8(num_rows, num_columns, height, width, size):
    torch.manual_seed(0)
    matrix = torch.randn(num_rows, num_columns) * size
    values, scales = quantise(matrix, (height, width))
    assert values.dtype is FP8 and values.shape == matrix.shape
    assert scales.dtype is torch.float32
    assert scales.shape == (-(-num_rows // height), -(-num_columns // width))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
            scale = max(matrix[part].abs().max().item(), 1e-12) / 448
            assert scales[i, j].item() == pytest.approx(scale, rel=1e-6)
            wanted = (matrix[part] / scales[i, j]).clamp(-448, 448).to(FP8)
            assert torch.equal(values[part].float(), wanted.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_restored_is_off_by_half_a_step_of_fp8_at_most(dtype):
    torch.manual_seed(0)
    matrix = torch.randn(300, 200).to(dtype)
    matrix[:128, :128] = 0
    values, scales = quantise(matrix, (128, 128))
    error = (restored(values, scales, (128, 128)) - matrix.float()).abs()
    # three bits of mantissa, or the smallest step of the block for what lies below its normal range
    step = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :200] * 2**-9
    assert (error <= torch.maximum(matrix.float().abs() * 2**-4, step)).all()
    assert (values[:128, :128].float() == 0).all()


@pytest.fixture(scope="session")
def fp8_model(models, tmp_path_factory) -> Path:
    """The first model in FP8."""
    directory = tmp_path_factory.mktemp("fp8") / "model"
    words = [sys.executable, str(ROOT / "scripts" / "make_fp8.py"), "--model", str(models[0]), "--out", str(directory)]
    subprocess.run(words, check=True)
    return directory


def test_the_trainers_weights_become_the_checkpoint(models, fp8_model):
    layout = read_fp8(str(fp8_model))
    assert layout is not None and layout.block == (128, 128)
    cast = dict(layout.cast(load_file(models[0] / "model.safetensors").items()))
    held = load_file(fp8_model / "model.safetensors")
    assert cast.keys() == held.keys()
    assert all(tensor.dtype == held[name].dtype for name, tensor in cast.items())
    assert all(torch.equal(tensor.float(), held[name].float()) for name, tensor in cast.items())
    kinds = {name.split(".")[-2] for name in layout.quantised}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all(f"{name}{SCALE}" in held for name in layout.quantised)


def test_transformers_reads_the_checkpoint_as_the_model_it_was(models, fp8_model):
    config = FineGrainedFP8Config(dequantize=True)
    read = AutoModelForCausalLM.from_pretrained(fp8_model, quantization_config=config, dtype=torch.float32)
    original = load_file(models[0] / "model.safetensors")
    for name, tensor in read.state_dict().items():
        if name in original:
            torch.testing.assert_close(tensor, original[name], rtol=2**-4, atol=original[name].abs().max().item() / 256)


def test_a_model_without_a_quantised_tensor_is_named(models, fp8_model):
    layout = read_fp8(str(fp8_model))
    tensors = load_file(models[0] / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(WeightSyncError, match=r"has model\.layers\.1\.mlp\.up_proj\.weight in FP8"):
        list(layout.cast(tensors.items()))


def test_a_plain_checkpoint_is_not_cast(models):
    assert read_fp8(str(models[0])) is None


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
    ],
)
def test_other_formats_are_refused(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(WeightSyncError, match=f"is quantised by '{config['quant_method']}'; .* scripts/make_fp8.py"):
        read_fp8(str(tmp_path))


def test_a_run_sends_fp8_and_starts_its_engines_with_it(models, fp8_model, tmp_path):
    words = ["--model", str(models[0]), "--engine", "sglang", "--rollout-model", str(fp8_model)]
    sync = WeightSync(parse(words).args, [], tmp_path)
    sent = dict(sync._tensors(Exporter(models[1])))
    sync.close()
    assert sent["model.layers.0.self_attn.q_proj.weight"].dtype is FP8
    assert sent["model.norm.weight"].dtype is torch.float32
    with pytest.raises(OptionError, match="--rollout-model is for SGLang"):
        parse(["--model", str(models[0]), "--rollout-model", str(fp8_model)])
