"""Exported weights, saved models, and exact resumption."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3Config

from slime_core.engines.checksum import model_checksums
from slime_core.errors import CheckpointError

# conftest's makers, for models that its fixtures do not cover
TINY = {
    "vocab_size": 258,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "stateless_adam"])
def test_a_resumed_run_goes_on_bitwise(optimizer, dtype, make_trainer, samples, shard_of, tmp_path):
    flags = (
        "--optimizer",
        optimizer,
        "--dtype",
        dtype,
        "--lr-schedule",
        "cosine",
        "--lr-warmup-steps",
        "2",
        "--num-rollout",
        "8",
    )
    rounds = [shard_of(samples(8, seed=seed), step_ends=[4, 8]) for seed in range(4)]
    unbroken = make_trainer(*flags, "--num-steps-per-rollout", "2")
    for step in (0, 1):
        unbroken.train(step, rounds[step])
    unbroken.save(tmp_path / "checkpoint")
    resumed = make_trainer(*flags, "--num-steps-per-rollout", "2")
    resumed.load(tmp_path / "checkpoint")
    for step in (2, 3):
        left, right = unbroken.train(step, rounds[step]), resumed.train(step, rounds[step])
        kept = [name for name in left if name.startswith("train/")]
        assert {name: left[name] for name in kept} == {name: right[name] for name in kept}
    assert model_checksums(unbroken.weights("float32")) == model_checksums(resumed.weights("float32"))


def test_a_save_beside_training_has_the_state_of_its_beginning(make_trainer, samples, shard_of, tmp_path):
    rounds = [shard_of(samples(8, seed=seed)) for seed in range(2)]
    trainer = make_trainer("--async-save")
    trainer.train(0, rounds[0])
    trainer.save(tmp_path / "checkpoint")
    trainer.train(1, rounds[1])
    assert trainer.saved(wait=True)
    resumed = make_trainer()
    resumed.load(tmp_path / "checkpoint")
    resumed.train(1, rounds[1])
    assert model_checksums(trainer.weights("float32")) == model_checksums(resumed.weights("float32"))


@pytest.mark.parametrize("flags", [(), ("--async-save",)], ids=["at_once", "beside"])
def test_a_place_that_cannot_be_written_is_named(flags, make_trainer, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "trainer").write_text("a file where a directory must be")
    trainer = make_trainer(*flags)
    with pytest.raises(CheckpointError, match=str(tmp_path / "checkpoint")):
        trainer.save(tmp_path / "checkpoint")
        trainer.saved(wait=True)


def test_a_file_cut_short_is_refused(make_trainer, tmp_path):
    trainer = make_trainer()
    trainer.save(tmp_path)
    (path,) = (tmp_path / "trainer").iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=str(tmp_path / "trainer")):
        trainer.load(tmp_path)


def test_a_saved_model_is_one_that_transformers_loads(make_trainer, samples, shard_of, tmp_path):
    trainer = make_trainer()
    trainer.train(0, shard_of(samples(8)))
    trainer.export(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert model_checksums(model.state_dict()) == model_checksums(trainer.weights("float32"))
    assert AutoTokenizer.from_pretrained(tmp_path / "model").encode("hi") == [71, 72]


def test_training_state_holds_no_code(make_trainer, samples, shard_of, tmp_path):
    trainer = make_trainer("--optimizer", "muon")
    trainer.train(0, shard_of(samples(8)))
    trainer.save(tmp_path)
    files = list((tmp_path / "trainer").iterdir())
    assert files and {path.suffix for path in files} == {".safetensors"}


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_given_once(tied, make_trainer, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path / "source")
    tensors = dict(make_trainer(model=tmp_path / "source").weights("float32"))
    assert ("lm_head.weight" in tensors) is not tied
    assert model_checksums(tensors) == model_checksums(model.state_dict())


@pytest.mark.parametrize("engine_dtype", ["float32", "bfloat16"])
def test_weights_are_given_in_the_engines_dtype(make_trainer, engine_dtype):
    tensors = make_trainer("--dtype", "bfloat16").weights(engine_dtype)
    assert {tensor.dtype for _, tensor in tensors} == {getattr(torch, engine_dtype)}


def test_a_missing_checkpoint_is_named(make_trainer, tmp_path):
    with pytest.raises(CheckpointError, match=str(tmp_path / "trainer")):
        make_trainer().load(tmp_path)


def test_a_checkpoint_of_another_model_is_refused(make_trainer, tmp_path):
    AutoModelForCausalLM.from_config(Qwen3Config(**TINY, head_dim=8)).save_pretrained(tmp_path / "other")
    make_trainer(model=tmp_path / "other").save(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=r"policy/weights/.* resume with the options of the run, --model"):
        make_trainer().load(tmp_path / "checkpoint")


def test_a_checkpoint_of_another_optimizer_is_refused(make_trainer, samples, shard_of, tmp_path):
    trainer = make_trainer("--optimizer", "muon")
    trainer.train(0, shard_of(samples(8)))
    trainer.save(tmp_path)
    with pytest.raises(CheckpointError, match="--optimizer"):
        make_trainer().load(tmp_path)
