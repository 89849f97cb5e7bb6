"""A run that is resumed trains what an unbroken one does, whatever its new layout."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from training.megatron.conftest import OVERLAP, PP2, TP2, run_ranks

LAYOUTS = {"tp2": TP2, "pp2": PP2, "dp2": OVERLAP}


@pytest.fixture(scope="module")
def resumed(case_of, models, tmp_path_factory):
    root = tmp_path_factory.mktemp("resumed")
    kept = {"checkpoint": str(root / "checkpoint")}
    other = case_of("other", "llama", *TP2, do="load_and_train", fails=True, **kept)
    cases = [
        case_of("saved", "qwen3", *TP2, do="train_and_save", **kept),
        *(case_of(name, "qwen3", *flags, do="load_and_train", **kept) for name, flags in LAYOUTS.items()),
        other,
    ]
    return run_ranks(root / "job", 2, cases), root / "checkpoint"


def both(ranks, name):
    """The weights as they were saved or loaded, and after one more round."""
    after = ranks.weights(name)
    return load_file(after.with_name(f"{name}_rank0_before.safetensors")), load_file(after)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_is_loaded_in_any_layout_and_the_run_goes_on(name, resumed):
    ranks, _ = resumed
    saved, unbroken = both(ranks, "saved")
    loaded, after = both(ranks, name)
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)
    # moments or counters that were not restored would show in the next step
    for key, value in unbroken.items():
        assert_close(after[key], value, rtol=0, atol=1e-6)
    mine, theirs = (ranks.found(case)["metrics"][0]["train/grad_norm"] for case in (name, "saved"))
    assert mine == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("name", ["saved", *LAYOUTS])
def test_every_parameter_counts_its_own_steps(name, resumed):
    # Megatron without Transformer-Engine gives all one counter: 35 steps after two updates of 34 parameters
    ranks, _ = resumed
    for rank in range(2):
        assert ranks.found(name, rank)["optimizer_steps"] == [5.0]


def test_transformers_reads_the_model_of_a_checkpoint(resumed):
    ranks, checkpoint = resumed
    model = AutoModelForCausalLM.from_pretrained(checkpoint / "model", dtype=torch.float32)
    saved, _ = both(ranks, "saved")
    own = model.state_dict()
    assert all(torch.equal(own[key], value) for key, value in saved.items())


def test_a_checkpoint_of_another_architecture_is_refused(resumed):
    ranks, _ = resumed
    for rank in range(2):
        error = ranks.found("other", rank)["error"]
        assert error.startswith("CheckpointError")
        assert "model_type qwen3 for llama" in error
