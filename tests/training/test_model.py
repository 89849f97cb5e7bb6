"""Packed log-probabilities and gradients equal those of every sequence run alone by plain transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from slime_core.errors import SlimeError
from slime_core.training.batch import TensorBatch
from slime_core.training.logit_scaling import LogitScaling
from slime_core.training.ranks import Ranks
from slime_core.training.torch_backend.load import load_policy
from slime_core.training.torch_backend.model import Policy
from slime_core.types import Sample, TrainBatch

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU, grouped=False)
COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
PLAIN = LogitScaling()
MIXED = ["full_attention", "sliding_attention"]
# name -> config, whether it packs, what it does to the logits of its output layer
MODELS = {
    "qwen3": (Qwen3Config(**COMMON, tie_word_embeddings=True), True, PLAIN),
    "qwen3_moe": (
        Qwen3MoeConfig(**COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
        True,
        PLAIN,
    ),
    "llama": (LlamaConfig(**COMMON), True, PLAIN),
    "mistral_sliding": (MistralConfig(**COMMON, sliding_window=5), True, PLAIN),
    "gpt2": (
        GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, eos_token_id=1),
        True,
        PLAIN,
    ),
    "gemma2": (
        Gemma2Config(
            **COMMON,
            sliding_window=5,
            layer_types=MIXED,
            query_pre_attn_scalar=5,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=0.5,
        ),
        True,
        LogitScaling(softcap=0.5),
    ),
    "cohere": (CohereConfig(**COMMON, logit_scale=0.25), True, LogitScaling(multiplier=0.25)),
    "granite": (GraniteConfig(**COMMON, logits_scaling=3.0), True, LogitScaling(divisor=3.0)),
    "gemma3": (Gemma3TextConfig(**COMMON, sliding_window=5, layer_types=MIXED, query_pre_attn_scalar=5), True, PLAIN),
    "bloom": (BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3), False, PLAIN),
}


def policy_of(make_args, config, directory: Path, *flags: str) -> Policy:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return load_policy(make_args(*flags, model=directory), ALONE)


def make_batch(shapes: list[tuple[int, int]]) -> TensorBatch:
    rng = np.random.default_rng(0)
    made = []
    for prompt, response in shapes:
        sample = Sample(tokens=rng.integers(2, 61, prompt).astype(np.int32))
        sample.append(rng.integers(2, 61, response))
        made.append(sample)
    return TensorBatch.of(TrainBatch.from_samples(made), CPU)


def alone(directory: Path, batch: TensorBatch, temperature: float = 1.0):
    """Log-probabilities, entropies and gradients, sequence by sequence and token by token."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    logprobs, entropies = [], []
    for tokens, response in zip(batch.tokens.split(batch.lengths.tolist()), batch.response_lengths, strict=True):
        logits = model(tokens[None]).logits[0] / temperature
        for place in range(len(tokens) - int(response), len(tokens)):
            log_p = torch.log_softmax(logits[place - 1], -1)
            logprobs.append(log_p[tokens[place]])
            entropies.append(-(log_p.exp() * log_p).sum())
    return model, torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("name", MODELS)
def test_packed_equals_alone(name, make_args, tmp_path):
    config, packs, scaling = MODELS[name]
    policy = policy_of(make_args, config, tmp_path)
    assert (policy.packs, policy.scaling) == (packs, scaling)
    batch = make_batch([(3, 14), (2, 9), (5, 3), (1, 1), (4, 2)])
    model, expected, entropies = alone(tmp_path, batch)
    logprobs, entropy = policy.logprobs(batch)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, entropies, rtol=0, atol=1e-5)

    pull = torch.linspace(-1, 1, len(expected))
    (pull * (expected + 0.3 * entropies)).sum().backward()
    (pull * (logprobs + 0.3 * entropy)).sum().backward()
    for (key, ours), theirs in zip(policy.model.named_parameters(), model.parameters(), strict=True):
        if theirs.grad is not None:
            scale = float(theirs.grad.abs().max()) + 1.0
            torch.testing.assert_close(ours.grad / scale, theirs.grad / scale, rtol=0, atol=1e-5, msg=key)


def test_very_uneven_lengths_are_laid_out_in_blocks(make_args, tmp_path):
    policy = policy_of(make_args, MODELS["llama"][0], tmp_path)
    batch = make_batch([(200, 700), *[(3, 5 + i % 7) for i in range(40)]])
    _, expected, _ = alone(tmp_path, batch)
    torch.testing.assert_close(policy.logprobs(batch)[0], expected, rtol=0, atol=2e-5)


def test_temperature_divides_the_logits(make_args, tmp_path):
    policy = policy_of(make_args, MODELS["llama"][0], tmp_path, "--temperature", "0.7")
    batch = make_batch([(3, 4), (2, 6)])
    _, expected, entropies = alone(tmp_path, batch, temperature=0.7)
    logprobs, entropy = policy.logprobs(batch)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, entropies, rtol=0, atol=1e-5)


def test_greedy_sampling_is_trained_at_temperature_1(make_args, tmp_path):
    assert policy_of(make_args, MODELS["llama"][0], tmp_path, "--temperature", "0").temperature == 1.0


WITH_DROPOUT = {
    "of_modules": GPT2Config(
        vocab_size=61, n_embd=32, n_layer=1, n_head=4, resid_pdrop=0.5, attn_pdrop=0.5, eos_token_id=1
    ),
    "of_layers": OPTConfig(
        vocab_size=61, hidden_size=32, word_embed_proj_dim=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=4,
        dropout=0.5, eos_token_id=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("flags", [[], ["--recompute-activations"]])
@pytest.mark.parametrize("kind", WITH_DROPOUT)
def test_dropout_is_off(kind, flags, make_args, tmp_path):
    policy = policy_of(make_args, WITH_DROPOUT[kind], tmp_path, *flags)
    batch = make_batch([(3, 4)])
    logprobs, _ = policy.logprobs(batch)
    logprobs.sum().backward()
    assert logprobs.tolist() == policy.logprobs(batch)[0].tolist()


def test_a_first_token_without_prompt_is_refused_when_trained(make_args, tmp_path):
    policy = policy_of(make_args, MODELS["llama"][0], tmp_path)
    batch = make_batch([(2, 3), (0, 4)])
    with pytest.raises(SlimeError, match="no prompt token"):
        policy.logprobs(batch)


def test_a_first_token_without_prompt_gets_0_when_masked(make_args, tmp_path):
    policy = policy_of(make_args, MODELS["llama"][0], tmp_path)
    bare = Sample()
    bare.append([5], trainable=False)
    bare.append([6, 7, 8])
    after = Sample(tokens=np.array([5], np.int32))
    after.append([6, 7, 8])
    logprobs, _ = policy.logprobs(TensorBatch.of(TrainBatch.from_samples([after, bare]), CPU))
    assert logprobs[3] == 0
    torch.testing.assert_close(logprobs[4:], logprobs[:3])
