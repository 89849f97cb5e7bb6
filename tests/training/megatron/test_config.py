"""Layouts, models and options that Megatron cannot train are refused before anything starts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from slime_core.cluster.placement import data_parallel_ranks
from slime_core.errors import OptionError
from slime_core.options import parse
from slime_core.training.megatron.config import check_backend, megatron_config
from slime_core.training.megatron.families.registry import find_family
from slime_core.training.megatron.spec import block_spec
from training.megatron.cases import CP2, EP2, PP2, SP, TP2


def options(model, *flags):
    return parse(["--model", str(model), "--train-backend", "megatron", *flags]).args


@pytest.mark.parametrize(
    ("family", "flags", "message"),
    [
        (
            "qwen3",
            ["--tensor-model-parallel-size", "3", "--num-trainers", "3"],
            "3 does not divide the 4 attention heads",
        ),
        ("qwen3", ["--pipeline-model-parallel-size", "3", "--num-trainers", "3"], "3 does not divide the 2 layers"),
        ("qwen3", [*EP2, "--num-trainers", "2"], "is for models with experts"),
        ("qwen3_moe", ["--expert-model-parallel-size", "3", "--num-trainers", "3"], "3 does not divide the 4 experts"),
        ("qwen3_moe", [*TP2, "--num-trainers", "2"], "only with --sequence-parallel"),
        ("qwen3", ["--routing-replay"], "--routing-replay: .* has no experts to choose from"),
    ],
)
def test_a_layout_that_does_not_fit_the_model(family, flags, message, models):
    with pytest.raises(OptionError, match=message):
        check_backend(options(models[family], *flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*TP2, "--num-trainers", "3"], "3 is no multiple of the 2 ranks of one copy of the model"),
        ([*EP2, "--num-trainers", "3"], "3 is no multiple of the 2 ranks of one copy of the experts"),
        ([*CP2, "--num-trainers", "3"], "3 is no multiple of the 2 ranks of one copy of the model"),
        (SP, "--sequence-parallel needs --tensor-model-parallel-size"),
        (["--overlap-param-gather"], "needs --overlap-grad-reduce"),
        (["--multimodal-keys", "image=images"], "--multimodal-keys is for --train-backend torch"),
        (["--optimizer", "muon"], "Megatron trains with adamw"),
        (["--data-parallel", "fsdp2"], "--data-parallel is for --train-backend torch"),
    ],
)
def test_options_that_do_not_go_together(flags, message, models):
    with pytest.raises(OptionError, match=message):
        options(models["qwen3"], *flags)


def test_megatron_flags_need_the_backend(models):
    with pytest.raises(OptionError, match="--pipeline-model-parallel-size is for Megatron; add --train-backend"):
        parse(["--model", str(models["qwen3"]), *PP2])


def test_a_family_without_rules_is_refused(models, tmp_path):
    config = json.loads((models["qwen3"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    with pytest.raises(OptionError, match="no rules for models of type 'mamba'"):
        check_backend(options(tmp_path))


def test_ranks_with_parts_of_one_copy_train_on_the_same_share(models):
    flags = [*TP2, *PP2, "--num-trainers", "8"]
    assert data_parallel_ranks(options(models["qwen3"], *flags)) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert data_parallel_ranks(options(models["qwen3"], *flags, *CP2)) == [0] * 8


@pytest.mark.parametrize(("family", "why"), [("qwen3", "there is none, or no GPU"), ("glm4", "norms are not among")])
def test_fp8_needs_the_layers_of_transformer_engine(family, why):
    config = SimpleNamespace(fp8="hybrid")
    with pytest.raises(OptionError, match=f"--fp8 hybrid .*Transformer-Engine.*{why}"):
        block_spec(config, post_norms=find_family(family).post_norms)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Qwen3Config(layer_types=["full_attention", "sliding_attention"], num_hidden_layers=2), "sliding windows"),
        (LlamaConfig(attention_bias=True), "biases for which its family has no rule"),
        (LlamaConfig(mlp_bias=True), "biases for which its family has no rule"),
    ],
)
def test_parts_of_a_model_without_a_counterpart_are_refused(config, message, models):
    family = find_family(config.model_type)
    with pytest.raises(OptionError, match=message):
        megatron_config(options(models["qwen3"]), config, family, torch.float32, True)
