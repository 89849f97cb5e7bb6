"""Where Megatron goes wrong without a word: each trap, and what shows that this backend does not fall into it.

Those of checkpoints are in test_checkpoint.py, that of the logits in test_loss.py, that of experts in test_config.py.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from training.megatron import reference


def test_the_gradient_norm_counts_the_parts_of_every_matrix(two_ranks, expected):
    # parameters that were never initialised are not marked as cut, and one rank's part is counted alone
    norms = [m["train/grad_norm"] for m in two_ranks.found("tp2")["metrics"]]
    assert norms == pytest.approx(expected("qwen3").grad_norms, rel=1e-5)


def test_norms_and_biases_do_not_decay(two_ranks, models, expected):
    # only Megatron's own scheduler applies the factor 0 of their weight decay
    before = AutoModelForCausalLM.from_pretrained(models["qwen2"], dtype=torch.float32).state_dict()
    wanted, found = expected("qwen2").weights, load_file(two_ranks.weights("pp2_tied"))
    small = [name for name, tensor in found.items() if tensor.ndim == 1]
    decay = len(expected("qwen2").losses) * reference.LR * reference.WEIGHT_DECAY
    norms = [name for name in small if name.endswith("norm.weight")]
    assert norms
    assert any(name.endswith("bias") for name in small)
    for name in norms:
        assert (decay * before[name]).abs().min() > 1e-4, "a decay would show"
    for name in small:
        assert (found[name] - wanted[name]).abs().max() < 1e-5


def test_exported_weights_are_those_after_the_last_update(two_ranks, expected):
    # under --overlap-param-gather a rank has the other ranks' updates only from the next forward on
    wanted = expected("qwen3").weights
    for rank in range(2):
        for name, tensor in load_file(two_ranks.weights("dp2_overlap", rank)).items():
            assert (tensor - wanted[name]).abs().max() < 5e-5, name


def test_a_tied_output_layer_on_another_stage_is_the_embedding(two_ranks, expected):
    # the last stage has a copy of its own, which must start and stay equal
    assert two_ranks.found("pp2_tied", 1)["prompt"] == pytest.approx(expected("qwen2").prompt, abs=1e-4)
    losses = [m["train/loss"] for m in two_ranks.found("pp2_tied")["metrics"]]
    assert losses == pytest.approx(expected("qwen2").losses, abs=1e-5)
