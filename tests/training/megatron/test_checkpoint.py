"""A run that is resumed trains what an unbroken one does, whatever its new layout."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from training.megatron.cases import EXPERTS_RESUMED, RESUMED


def both(ranks, name):
    """The weights as they were saved or loaded, and after one more round."""
    after = ranks.weights(name)
    return load_file(after.with_name(f"{name}_rank0_before.safetensors")), load_file(after)


def check_resumed(ranks, name, saved_name):
    """A case has what was saved, and trains from there what the case that saved it does."""
    saved, unbroken = both(ranks, saved_name)
    loaded, after = both(ranks, name)
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)
    # moments or counters that were not restored would show in the next step
    for key, value in unbroken.items():
        assert_close(after[key], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_is_loaded_in_any_layout_and_the_run_goes_on(name, two_ranks):
    check_resumed(two_ranks, name, "saved")
    mine, theirs = (two_ranks.found(case)["metrics"][0] for case in (name, "saved"))
    assert mine["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-5)
    # two steps: the second's loss shows what the critic's own moments made of it
    for key in ("train/value", "train/value_loss"):
        assert mine[key] == pytest.approx(theirs[key], rel=1e-5)


@pytest.mark.parametrize("name", EXPERTS_RESUMED)
def test_the_moments_of_experts_are_loaded_in_any_layout(name, two_ranks):
    check_resumed(two_ranks, name, "experts_saved")


@pytest.mark.parametrize("name", ["saved", *RESUMED])
def test_every_parameter_counts_its_own_steps(name, two_ranks):
    # Megatron without Transformer-Engine gives all one counter: 35 steps after two updates of 34 parameters
    for rank in range(2):
        assert two_ranks.found(name, rank)["optimizer_steps"] == [10.0]


def test_transformers_reads_the_model_of_a_checkpoint(two_ranks, checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint / "model", dtype=torch.float32)
    saved, _ = both(two_ranks, "saved")
    own = model.state_dict()
    assert all(torch.equal(own[key], value) for key, value in saved.items())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other_model", "is of another architecture than --model: model_type qwen3 for llama"),
        ("other_critic", "is of another architecture than --critic-model: model_type qwen3 for llama"),
        ("no_critic", "has no critic; resume with the options of the run"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(name, message, two_ranks):
    error = two_ranks.found(name)["error"]
    assert error.startswith("CheckpointError")
    assert message in error


def test_a_checkpoint_before_the_first_update_is_loaded(two_ranks, expected):
    # there are no moments yet, which Megatron would not find
    found = two_ranks.found("fresh")
    assert [m["train/grad_norm"] for m in found["metrics"]] == pytest.approx(expected("qwen3").grad_norms, abs=1e-5)


def test_weights_in_bfloat16_resume_from_their_float32_masters(two_ranks):
    found = two_ranks.found("bfloat16")
    for mine, theirs in zip(found["resumed"], found["unbroken"], strict=True):
        kept = [key for key in theirs if key.startswith("train/")]
        assert "train/value_loss" in kept
        assert {key: mine[key] for key in kept} == {key: theirs[key] for key in kept}
