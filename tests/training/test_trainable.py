"""What trains: named parameters, LoRA adapters; and layers whose activations are computed twice."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime_core.engines.checksum import model_checksums
from slime_core.errors import CheckpointError, OptionError
from slime_core.training.torch_backend.checkpoint import saved_shapes


def changed(trainer, model_dir) -> set[str]:
    """Names of the weights that are not the model's any more."""
    before = model_checksums(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).state_dict())
    after = model_checksums(trainer.weights("float32"))
    assert before.keys() >= after.keys()
    return {name for name in after if after[name] != before[name]}


def test_frozen_parameters_stay_as_they_are(make_trainer, samples, shard_of, model_dir):
    trainer = make_trainer("--freeze-params", "embed_tokens", r"layers\.0\.")
    trainer.train(0, shard_of(samples(8)))
    names = changed(trainer, model_dir)
    assert "model.norm.weight" in names
    assert {name for name in names if "layers." in name} == {name for name in names if "layers.1." in name} != set()
    assert not any("embed_tokens" in name for name in names)


def test_only_named_parameters_train(make_trainer, samples, shard_of, model_dir):
    trainer = make_trainer("--only-train-params", "mlp", "--freeze-params", r"layers\.1")
    trainer.train(0, shard_of(samples(8)))
    assert changed(trainer, model_dir) == {f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--freeze-params", "lm_heat"], "'lm_heat' fits no parameter"),
        (["--freeze-params", "."], "leave no parameter to train"),
        (["--lora-rank", "2", "--lora-targets", "q_prj"], "--lora-targets"),
    ],
)
def test_names_that_fit_nothing_are_refused(flags, words, make_trainer):
    with pytest.raises(OptionError, match=words):
        make_trainer(*flags)


def test_adapters_train_and_reach_the_engines_merged(make_trainer, samples, shard_of, model_dir):
    trainer = make_trainer("--lora-rank", "2", "--lora-targets", "q_proj", "down_proj", "--lr", "1e-2")
    trainer.train(0, shard_of(samples(8)))
    names = changed(trainer, model_dir)
    layers = range(2)
    assert names == {
        f"model.layers.{n}.{part}.weight" for n in layers for part in ("self_attn.q_proj", "mlp.down_proj")
    }
    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    plain.load_state_dict(dict(trainer.weights("float32")), strict=False)
    prompt = list(range(60, 80))
    with torch.no_grad():
        logprobs = plain(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert trainer.prompt_logprobs(prompt) == pytest.approx(expected.numpy(), abs=1e-5)


def test_a_checkpoint_has_the_adapters_alone_under_pefts_names(make_trainer, model_dir, tmp_path):
    make_trainer("--lora-rank", "4").save(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    theirs = get_peft_model(plain, LoraConfig(r=4, target_modules="all-linear"))
    adapters = {
        name.removeprefix("base_model.model."): p.shape for name, p in theirs.named_parameters() if p.requires_grad
    }
    saved = {
        name.removeprefix("policy/weights/"): shape
        for name, shape in saved_shapes(tmp_path).items()
        if name.startswith("policy/weights/")
    }
    assert saved == adapters


def test_resumed_adapters_go_on_bitwise(make_trainer, samples, shard_of, tmp_path):
    flags = ("--lora-rank", "2", "--lr", "1e-2")
    rounds = [shard_of(samples(8, seed=seed)) for seed in range(2)]
    unbroken = make_trainer(*flags)
    unbroken.train(0, rounds[0])
    unbroken.save(tmp_path)
    resumed = make_trainer(*flags, "--seed", "7")
    resumed.load(tmp_path)
    for trainer in (unbroken, resumed):
        trainer.train(1, rounds[1])
    assert model_checksums(unbroken.weights("float32")) == model_checksums(resumed.weights("float32"))


def test_a_model_with_adapters_is_exported_plain(make_trainer, samples, shard_of, tmp_path):
    trainer = make_trainer("--lora-rank", "2", "--lr", "1e-2")
    trainer.train(0, shard_of(samples(8)))
    trainer.export(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert model_checksums(model.state_dict()) == model_checksums(trainer.weights("float32"))


@pytest.mark.parametrize("flags", [(), ("--lora-rank", "2")], ids=["all", "adapters"])
def test_recomputed_activations_give_the_same_step(flags, make_trainer, samples, shard_of):
    kept, recomputing = make_trainer(*flags), make_trainer(*flags, "--recompute-activations")
    saved = []
    for trainer in (kept, recomputing):
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.nbytes) or t, lambda t: t):
            trainer.train(0, shard_of(samples(8)))
        saved.append(sum(sizes))
    assert model_checksums(kept.weights("float32")) == model_checksums(recomputing.weights("float32"))
    assert saved[1] < saved[0] / 2


def test_the_critic_trains_whole_beside_adapters(make_trainer, tmp_path):
    make_trainer("--lora-rank", "2", "--advantage-estimator", "ppo", "--critic").save(tmp_path)
    critic = {name for name in saved_shapes(tmp_path) if name.startswith("critic/weights/")}
    assert "critic/weights/body.embed_tokens.weight" in critic
    assert not any("lora" in name for name in critic)


def test_a_run_does_not_go_on_with_fewer_trained_parameters(make_trainer, samples, shard_of, tmp_path):
    trainer = make_trainer()
    trainer.train(0, shard_of(samples(4)))
    trainer.save(tmp_path)
    narrower = make_trainer("--freeze-params", "embed_tokens")
    with pytest.raises(CheckpointError, match=r"has policy/weights/.*embed_tokens.*, which these options do not train"):
        narrower.load(tmp_path)


def test_an_export_names_the_dtype_of_its_weights(make_trainer, tmp_path):
    make_trainer("--dtype", "bfloat16").export(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_adapters_on_a_tied_head_are_refused(make_trainer):
    with pytest.raises(OptionError, match="embedding or head of --model, which share a tensor"):
        make_trainer("--lora-rank", "2", "--lora-targets", "q_proj", "embed_tokens")
